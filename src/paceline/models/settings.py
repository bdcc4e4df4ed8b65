"""Settings of the network, the section `[model]` of a recipe, and names of models: their forms,
registration by other packages, and which ones run foreign code. Torch-free.

A name is one of ours (`resnet50`), `timm:NAME`, `torchvision:NAME`, `package.module:factory`, or a name
that another package has registered: with `register_model`, or as an entry point of the group
`paceline.models`. A name's form is checked here, and `factories` imports what it names.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import SettingChecks, parse_arguments

# Stems of each of our models, besides `auto`.
_RESNET_STEMS = ("imagenet", "small")
STEMS_OF_MODEL: dict[str, tuple[str, ...]] = {
    "resnet18": _RESNET_STEMS,
    "resnet34": _RESNET_STEMS,
    "resnet50": _RESNET_STEMS,
    "resnet101": _RESNET_STEMS,
    "resnet152": _RESNET_STEMS,
    "resnet_tiny": ("small",),
    "resnet_fast": ("small",),
    "alexnet": (),
    "alexnet2012": (),
    "alexnet_bn": (),
}
MODEL_NAMES: tuple[str, ...] = tuple(STEMS_OF_MODEL)
STEM_NAMES: tuple[str, ...] = ("auto", *_RESNET_STEMS)
# Packages whose models have names of their own.
ZOOS = ("timm", "torchvision")
ENTRY_POINTS = "paceline.models"
FORMS = "timm:NAME, torchvision:NAME or package.module:factory"

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# timm's names have tags and dots, and those of a hub slashes and colons.
_ZOO_NAME = re.compile(r"[\w./:\-]+")

Factory = Callable[..., Any]
_registered: dict[str, Factory] = {}


def register_model(name: str, factory: Factory) -> None:
    """Makes `name` a model of this process: `factory` is called with `num_classes`, `in_channels` and
    `image_size`, as far as it takes them, and returns a module. A second call replaces the first.

    >>> from torch import nn
    >>> def make(num_classes: int) -> nn.Module:
    ...     return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
    >>> register_model("my_linear", make)

    An installed package can do the same for every process, in its `pyproject.toml`:
    `[project.entry-points."paceline.models"]` and `my_linear = "my_package.nets:make"`.
    """
    if not _PATH.fullmatch(name) or "." in name:
        raise ConfigError(
            "name", name, "is not a name of a model", "use letters, digits and underscores"
        )
    if name in STEMS_OF_MODEL:
        raise ConfigError("name", name, "is one of Paceline's own models", "choose another name")
    if not callable(factory):
        raise ConfigError("factory", factory, "cannot be called", "give a function or a class")
    _registered[name] = factory


def registered_models() -> dict[str, str]:
    """Names that other code has registered, and where each comes from."""
    found = {name: f"{point.value} ({package})" for name, (point, package) in _points().items()}
    return found | dict.fromkeys(_registered, "registered in this process")


def registered_factory(name: str) -> Factory | importlib.metadata.EntryPoint | None:
    """The factory of a registered name, not imported yet where an entry point names it."""
    if name in _registered:
        return _registered[name]
    return _points()[name][0] if name in _points() else None


def _points() -> dict[str, tuple[importlib.metadata.EntryPoint, str]]:
    return _points_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _points_on(path: tuple[str, ...]) -> dict[str, tuple[importlib.metadata.EntryPoint, str]]:
    """Entry points of the packages on `path` by name, with the name of their package."""
    return {
        point.name: (point, point.dist.name if point.dist else "")
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
        if point.name not in STEMS_OF_MODEL
    }


def split_name(name: str) -> tuple[str, str]:
    """`("timm", "convnext_tiny")`, `("my_package.nets", "make")`, or `("", "resnet50")`."""
    source, colon, rest = name.partition(":")
    return (source, rest) if colon else ("", name)


def check_model_name(name: str) -> None:
    """Raises ConfigError for a name of no known form, and for an unknown name without a colon. Whether
    a package has such a model is found when it is created."""
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
    """As `nearest`, but points to `listing` instead of printing a thousand names."""
    found = nearest(name, known)
    return found if found.startswith("did you mean") else f"{listing} lists them"


__all__ = ["MODEL_NAMES", "ModelSettings", "check_model_name"]

# Images up to this size lose too much in a 7x7/2 convolution followed by a pool.
SMALL_STEM_MAX_PIXELS = 64
NORM_STATISTICS = ("average", "last")


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
    norm_statistics: str = "average"
    """Batch-norm statistics for evaluation: `average` (moving averages) or `last` (those of the last
    micro-batch of each rank, averaged over ranks before evaluation)."""

    def __post_init__(self) -> None:
        check_model_name(self.name)
        check = SettingChecks("model", self)
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
