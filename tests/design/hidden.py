"""`hide(packages)`: makes extension packages unimportable here, as if they had been deleted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _Hidden(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if any(f"{name}.".startswith(f"paceline.{package}.") for package in self._packages):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide(packages: Sequence[str]) -> None:
    """Core modules are imported again, so that none keeps what it took from a package."""
    for name in list(sys.modules):
        if name == "paceline" or name.startswith("paceline."):
            del sys.modules[name]
    sys.meta_path.insert(0, _Hidden(packages))
