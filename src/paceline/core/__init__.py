"""What every package shares: errors, topology, settings, files. Imports the standard library only."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
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
    package: str, modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names load on first use, so that reading its
    settings does not import torch. These are the names that its block `if TYPE_CHECKING` imports, or
    those of `modules`: for each name the module that defines it, of this package or with its full name.

    >>> __getattr__, __dir__ = lazy_exports("paceline.optim", {"LARS": "lars"})
    """
    known = _typed_imports(package) if modules is None else modules

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = known[name]
        full = module if module.startswith("paceline.") else f"{package}.{module}"
        value = getattr(importlib.import_module(full), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *known})


def _typed_imports(package: str) -> dict[str, str]:
    """The names that the block `if TYPE_CHECKING` of a package imports, and their modules."""
    tree = ast.parse(Path(sys.modules[package].__file__ or "").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}
