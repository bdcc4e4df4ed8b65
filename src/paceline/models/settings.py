"""Defines the section `[model]` of a recipe and the names of models.

A name has one of these forms: a model of Paceline (`resnet50`), `timm:NAME`, `torchvision:NAME`,
`package.module:factory`, or a name given to `register_model`. This module checks the syntax of names, and
`factories` imports the models. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import SettingChecks, parse_arguments

# Values of `model.stem`, in addition to `auto`, for each model of Paceline.
_RESNET_STEMS = ("imagenet", "small")
STEMS_OF_MODEL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), _RESNET_STEMS),
    **dict.fromkeys(("resnet_tiny", "resnet_fast"), ("small",)),
    **dict.fromkeys(("alexnet", "alexnet_bn"), ()),
}
MODEL_NAMES: tuple[str, ...] = tuple(STEMS_OF_MODEL)
STEM_NAMES: tuple[str, ...] = ("auto", *_RESNET_STEMS)
ZOOS = ("timm", "torchvision")
FORMS = "timm:NAME, torchvision:NAME or package.module:factory"

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Names in timm may contain tags and dots, and names on a hub also slashes and colons.
_ZOO_NAME = re.compile(r"[\w./:\-]+")

Factory = Callable[..., Any]
_registered: dict[str, Factory] = {}


def register_model(name: str, factory: Factory) -> None:
    """Registers a model for this process. A second call with the name replaces the first.

    Args:
        name: New value of `model.name`.
        factory: Function or class that returns a module. It receives each of the arguments
            `num_classes`, `in_channels` and `image_size` that the signature contains.

    Raises:
        ConfigError: If the name is invalid or taken, or if the factory cannot be called.

    Example:
        >>> def make(num_classes: int) -> nn.Module:
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
        >>> register_model("my_linear", make)
    """
    if not _PATH.fullmatch(name) or "." in name:
        raise ConfigError(
            "name", name, "is not a valid model name", "use letters, digits and underscores"
        )
    if name in STEMS_OF_MODEL:
        raise ConfigError("name", name, "is a model of Paceline", "choose another name")
    if not callable(factory):
        raise ConfigError("factory", factory, "cannot be called", "give a function or a class")
    _registered[name] = factory


def registered_models() -> Mapping[str, Factory]:
    """Returns the factories that `register_model` has registered, by name."""
    return _registered


def split_name(name: str) -> tuple[str, str]:
    """Splits a name at the colon, as in `("timm", "convnext_tiny")` or `("", "resnet50")`."""
    source, colon, rest = name.partition(":")
    return (source, rest) if colon else ("", name)


def check_model_name(name: str) -> None:
    """Raises ConfigError if a model name is malformed, or has no colon and is unknown.

    Does not check if a package contains the model; creating the model does.
    """
    if name in STEMS_OF_MODEL:
        return
    source, rest = split_name(name)
    if source:
        pattern = _ZOO_NAME if source in ZOOS else _PATH
        if not _PATH.fullmatch(source) or not pattern.fullmatch(rest):
            raise ConfigError("model.name", name, "is not a model", f"write it as {FORMS}")
        return
    known = [*MODEL_NAMES, *registered_models()]
    if name not in known:
        raise ConfigError(
            "model.name", name, "is not a model", f"{nearest(name, known)}; or give {FORMS}"
        )


def nearest_of_many(name: str, known: Iterable[str], listing: str) -> str:
    """Returns a text that suggests a similar name, or the command that lists all names.

    Args:
        name: The unknown name.
        known: All known names.
        listing: Command that lists all known names.
    """
    hint = nearest(name, known)
    return hint if hint.startswith("did you mean") else f"{listing} lists them"


# From images up to this size, a 7x7 convolution with stride 2 and a pool would remove too much detail.
SMALL_STEM_MAX_PIXELS = 64
NORM_STATISTICS = ("average", "last")


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the network and its initialization.

    Example:
        >>> ModelSettings(name="resnet18", stem="small")
    """

    name: str = "resnet50"
    """`resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152`, `resnet_tiny`, `resnet_fast`,
    `alexnet`, `alexnet_bn`, `timm:NAME`, `torchvision:NAME`, `package.module:factory`, or
    a registered name."""
    arguments: str = ""
    """Further keyword arguments for a model that is not part of Paceline, as a TOML table:
    `{drop_rate = 0.1}`."""
    freeze: tuple[str, ...] = ()
    """Parameters to freeze: glob patterns of their names (`layer1.*`), or names of modules (`layer1`).
    Batch norms whose parameters are all frozen use their running statistics."""
    num_classes: int | None = None
    """Number of classes; unset, that of the data."""
    stem: str = "auto"
    """First layers of a ResNet: `imagenet` (7×7, stride 2, max-pool), `small` (3×3, stride 1), or
    `auto` (`small` for images of at most 64 pixels)."""
    zero_init_gamma: bool = True
    """Initialize the last γ of each residual branch to 0; no effect on AlexNets."""
    dropout: float = 0.5
    """Dropout of the AlexNets; no effect on ResNets."""
    norm_statistics: str = "average"
    """Batch-norm statistics for evaluation: `average` (moving averages) or `last` (statistics of the last
    micro-batch, averaged over ranks)."""

    def __post_init__(self) -> None:
        check_model_name(self.name)
        check = SettingChecks("model", self)
        check.known("norm_statistics", NORM_STATISTICS)
        check.number("num_classes", "at least 1", "leave it out to take the number from the data")
        if self.arguments_table() and self.name in MODEL_NAMES:
            raise ConfigError(
                "model.arguments", self.arguments, f"{self.name} takes no arguments",
                "use the other settings of [model]",
            )  # fmt: skip
        for pattern in self.freeze:
            if not pattern.strip():
                raise ConfigError("model.freeze", list(self.freeze), "has an empty pattern")
        check.number("dropout", "in [0, 1)", "try 0.5")
        check.known("stem", STEM_NAMES)
        if self.stem != "auto" and self.stem not in STEMS_OF_MODEL.get(self.name, ()):
            raise ConfigError(
                "model.stem", self.stem, f"{self.name} has no such stem", "set model.stem to 'auto'"
            )

    def arguments_table(self) -> dict[str, Any]:
        """Returns `arguments` as a dictionary."""
        return parse_arguments("model.arguments", self.arguments)

    def stem_for(self, image_size: int) -> str:
        """Returns the stem of a ResNet for images with `image_size` pixels per side."""
        if self.stem != "auto":
            return self.stem
        return "small" if image_size <= SMALL_STEM_MAX_PIXELS else "imagenet"
