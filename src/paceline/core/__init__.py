"""What every package shares: errors, topology, settings, files. Imports the standard library only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DataError,
    LaunchError,
    PacelineError,
    RunError,
)
from paceline.core.topology import Topology

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "PacelineError",
    "RunError",
    "Topology",
    "lazy_exports",
]


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names load on first use, so that reading its
    settings does not import torch. `modules` names, for each public name, the module that
    defines it: of this package, or with its full name.

    >>> __getattr__, __dir__ = lazy_exports("paceline.optim", {"LARS": "lars"})
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        full = module if module.startswith("paceline.") else f"{package}.{module}"
        value = getattr(importlib.import_module(full), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
