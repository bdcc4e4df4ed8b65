"""Names of models: their forms, registration by other packages, and which ones run foreign code.

A name is one of ours (`resnet50`), `timm:NAME`, `torchvision:NAME`, `package.module:factory`, or a name
that another package has registered: with `register_model`, or as an entry point of the group
`paceline.models`. Torch-free: a name's form is checked here, and `factories` imports what it names.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.imports import PYTHON

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


def foreign_code(name: str) -> str:
    """What code creating the model `name` runs that neither Paceline nor this program has chosen;
    empty for our models, timm's and torchvision's, and those that this process has registered."""
    source, rest = split_name(name)
    if source:
        if source in ZOOS and (":" in rest or "/" in rest):
            return f"{rest!r}, from a hub or a folder"
        return "" if source in (*ZOOS, PYTHON) else f"the module {source}"
    if name not in STEMS_OF_MODEL and name not in _registered and name in _points():
        return f"the package {_points()[name][1]}"
    return ""
