"""Extension packages: what the core loads only if a setting or a command asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import ConfigError


def missing_extension(error: ImportError) -> str:
    """Returns the package of Paceline that an import did not find; "" if another one is missing."""
    package = ".".join((error.name or "").split(".")[:2])
    return package if package.startswith("paceline.") else ""


@contextmanager
def needed_by(field: str, value: object) -> Iterator[None]:
    """Raises ConfigError if an import inside of it needs an extension package that was removed."""
    try:
        yield
    except ImportError as error:
        package = missing_extension(error)
        if not package:
            raise
        raise ConfigError(
            field, value, f"needs the package {package}, which is not part of this installation",
            f"install Paceline with it, or leave {field} out",
        ) from None  # fmt: skip


def load_extension(name: str, field: str, value: object) -> Any:
    """Imports the extension package or module `paceline.NAME`, which the setting `field` asks for. Raises
    ConfigError if it was removed."""
    with needed_by(field, value):
        return importlib.import_module(f"paceline.{name}")


def load_chosen(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Imports the module of `paceline.PACKAGE` that `modules` has for the choice `name`."""
    return importlib.import_module(f"paceline.{package}.{modules[name]}")
