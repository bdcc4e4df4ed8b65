"""Code that all packages share: errors, topology, settings, files. Uses the standard library only."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package import its public names on first use, so that importing it needs no torch.

    The public names are those that the package imports in its block `if TYPE_CHECKING`, there as
    `from module import name as name`, the form of a re-export.

    Args:
        package: The name of the package.

    Returns:
        The functions `__getattr__` and `__dir__` of the package.
    """
    known = _typed_imports(package)

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(known[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *known})


def _typed_imports(package: str) -> dict[str, str]:
    """Returns the names that a package imports in its block `if TYPE_CHECKING`, with their modules."""
    tree = ast.parse(Path(sys.modules[package].__file__ or "").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}
