"""Settings of the network: the section `[model]` of a recipe. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError, nearest

# Stems of each model, besides `auto`.
_RESNET_STEMS = ("imagenet", "small")
_STEMS_OF_MODEL: dict[str, tuple[str, ...]] = {
    "resnet18": _RESNET_STEMS,
    "resnet34": _RESNET_STEMS,
    "resnet50": _RESNET_STEMS,
    "resnet101": _RESNET_STEMS,
    "resnet152": _RESNET_STEMS,
    "resnet_tiny": ("small",),
    "alexnet": (),
    "alexnet2012": (),
    "alexnet_bn": (),
}

MODEL_NAMES: tuple[str, ...] = tuple(_STEMS_OF_MODEL)
STEM_NAMES: tuple[str, ...] = ("auto", *_RESNET_STEMS)

# Images up to this size lose too much in a 7x7/2 convolution followed by a pool.
SMALL_STEM_MAX_PIXELS = 64


@dataclass(frozen=True)
class ModelSettings:
    """Which network to train, and its initialization."""

    name: str = "resnet50"
    """`resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152`, `resnet_tiny`, `alexnet`,
    `alexnet2012` or `alexnet_bn`."""
    num_classes: int | None = None
    """Number of classes; unset, that of the data."""
    stem: str = "auto"
    """First layers of a ResNet: `imagenet` (7×7, stride 2, max-pool), `small` (3×3, stride 1), or
    `auto` (`small` for images of at most 64 pixels)."""
    zero_init_gamma: bool = True
    """Initialize the last γ of each residual branch to 0; no effect on AlexNets."""
    dropout: float = 0.5
    """Dropout of the AlexNets; no effect on ResNets."""
    pool5_norm: bool = True
    """Batch norm after pool5 of `alexnet_bn`; `false` is for ablations."""

    def __post_init__(self) -> None:
        check_model_name(self.name)
        if self.num_classes is not None and self.num_classes < 1:
            raise ConfigError(
                "model.num_classes",
                self.num_classes,
                "must be at least 1",
                "leave it out to take the number from the data",
            )
        self._check_stem()
        if not self.pool5_norm and self.name != "alexnet_bn":
            raise ConfigError(
                "model.pool5_norm", False, f"{self.name} has no batch norm after pool5",
                "leave it out, or use alexnet_bn",
            )  # fmt: skip
        # Written so that NaN fails too.
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                "model.dropout", self.dropout, "must be at least 0 and below 1", "0.5 is usual"
            )

    def _check_stem(self) -> None:
        if self.stem not in STEM_NAMES:
            raise ConfigError(
                "model.stem", self.stem, "is not a stem", nearest(self.stem, STEM_NAMES)
            )
        if self.stem != "auto" and self.stem not in _STEMS_OF_MODEL[self.name]:
            raise ConfigError(
                "model.stem", self.stem, f"{self.name} has no such stem", "set model.stem to 'auto'"
            )

    def stem_for(self, image_size: int) -> str:
        """The stem of a residual net for images of `image_size` pixels."""
        if self.stem != "auto":
            return self.stem
        return "small" if image_size <= SMALL_STEM_MAX_PIXELS else "imagenet"


def check_model_name(name: str) -> None:
    """Raises ConfigError, with the nearest known name, if there is no such model."""
    if name not in _STEMS_OF_MODEL:
        raise ConfigError("model.name", name, "is not a model", nearest(name, MODEL_NAMES))
