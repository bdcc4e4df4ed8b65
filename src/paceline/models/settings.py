"""Settings of the network: the section `[model]` of a recipe. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import SettingChecks, parse_arguments
from paceline.models.names import (
    MODEL_NAMES,
    STEM_NAMES,
    STEMS_OF_MODEL,
    check_model_name,
    foreign_code,
)

__all__ = ["MODEL_NAMES", "ModelSettings", "check_model_name", "check_trust", "requires_trust"]

# Images up to this size lose too much in a 7x7/2 convolution followed by a pool.
SMALL_STEM_MAX_PIXELS = 64
NORM_STATISTICS = ("average", "last")
# Keyword arguments with which timm and torchvision read weights or configurations from elsewhere.
_LOADING = ("checkpoint", "pretrained", "weights", "cache_dir", "url", "hf_")


@dataclass(frozen=True)
class ModelSettings:
    """Which network to train, and its initialization."""

    name: str = "resnet50"
    """`resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152`, `resnet_tiny`, `resnet_fast`,
    `alexnet`, `alexnet2012`, `alexnet_bn`, `timm:NAME`, `torchvision:NAME`, `package.module:factory`, or
    a name that a package has registered."""
    arguments: str = ""
    """More keyword arguments for the factory of a model that is not ours, as a TOML table:
    `{drop_rate = 0.1}`."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: glob patterns of their names (`layer1.*`), or names of modules
    (`layer1`). Batch norms whose parameters are all frozen use their running statistics."""
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
    norm_group: int = 1
    """Ranks, one after the other, over whose micro-batches batch norm computes its statistics; 1: each
    rank by itself."""
    norm_statistics: str = "average"
    """Batch-norm statistics for evaluation: `average` (moving averages) or `last` (those of the last
    micro-batch of each rank, averaged over ranks before evaluation)."""

    def __post_init__(self) -> None:
        check_model_name(self.name)
        check = SettingChecks("model", self)
        check.number("norm_group", "at least 1")
        check.known("norm_statistics", NORM_STATISTICS)
        check.number("num_classes", "at least 1", "leave it out to take the number from the data")
        self._check_stem()
        if self.arguments_table() and self.name in MODEL_NAMES:
            raise ConfigError(
                "model.arguments", self.arguments, f"{self.name} takes none",
                "use the other settings of [model]",
            )  # fmt: skip
        for pattern in self.freeze:
            if not pattern.strip():
                raise ConfigError("model.freeze", list(self.freeze), "has an empty pattern")
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
        if self.stem != "auto" and self.stem not in STEMS_OF_MODEL.get(self.name, ()):
            raise ConfigError(
                "model.stem", self.stem, f"{self.name} has no such stem", "set model.stem to 'auto'"
            )

    def arguments_table(self) -> dict[str, Any]:
        """`arguments` as a dictionary."""
        return parse_arguments("model.arguments", self.arguments)

    def stem_for(self, image_size: int) -> str:
        """The stem of a residual net for images of `image_size` pixels."""
        if self.stem != "auto":
            return self.stem
        return "small" if image_size <= SMALL_STEM_MAX_PIXELS else "imagenet"


def requires_trust(settings: ModelSettings) -> str:
    """Why creating this model needs the user's consent where a file or folder names it: the code that
    would run. Empty where none is needed."""
    code = foreign_code(settings.name)
    if code:
        return f"the model {settings.name!r} runs code of {code}"
    loads = [name for name in settings.arguments_table() if name.startswith(_LOADING)]
    if loads:
        return f"model.arguments has {loads[0]!r}, which reads a file or a hub, perhaps a pickle"
    return ""


def check_trust(settings: ModelSettings, origin: object, trust: bool) -> None:
    """Before a model is created whose name comes from the file or folder `origin` and not from the
    user: raises ConfigError if it would run foreign code and `trust` is False."""
    reason = requires_trust(settings)
    if reason and not trust:
        raise ConfigError(
            "--trust", None, f"{origin}: {reason}", "add --trust if you trust this code"
        )
