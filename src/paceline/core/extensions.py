"""Extensions: parts that the core loads only if a setting or a command asks for them.

Each extension package has a table of its parts. A `Registry` looks up the parts of one kind by
name. It knows the parts of the core, the parts in these tables, and the parts that a program
registers.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

from paceline.core.errors import ConfigError, nearest

Part = TypeVar("Part")


def missing_extension(error: ImportError) -> str:
    """Returns the name of the missing module of Paceline; empty if another package is missing."""
    name = error.name or ""
    return name if name.startswith("paceline.") else ""


@contextmanager
def needed_by(field: str, value: object) -> Iterator[None]:
    """Raises ConfigError if an import in the block needs an extension that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = missing_extension(error)
        if not package:
            raise
        raise ConfigError(
            field, value, f"needs the package {package}, which is not part of this installation",
            f"install Paceline with that package, or leave {field} out",
        ) from None  # fmt: skip


def load_extension(name: str, field: str, value: object) -> Any:
    """Imports an extension package or module.

    Args:
        name: The name of the package or module without `paceline.`.
        field: The setting that needs the extension.
        value: The value of the setting.

    Raises:
        ConfigError: If the extension is not installed.
    """
    with needed_by(field, value):
        return importlib.import_module(f"paceline.{name}")


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]] | None]:
    """Returns the table of each extension package; None for a package that is not installed."""
    tables: dict[str, Mapping[str, Mapping[str, str]] | None] = {}
    for package in importlib.import_module("paceline.extensions").PACKAGES:
        try:
            tables[package] = importlib.import_module(f"paceline.{package}").PROVIDES
        except ImportError as error:
            if missing_extension(error) != f"paceline.{package}":
                raise
            tables[package] = None
    return tables


def provided(kind: str) -> Mapping[str, str]:
    """Returns the `module:attribute` of each part of one kind in extension packages, by name."""
    added: dict[str, str] = {}
    for table in _tables().values():
        added |= (table or {}).get(kind, {})
    return added


def missing_packages() -> str:
    """Returns a remark on extension packages that are not installed; empty if there are none."""
    missing = [f"paceline.{name}" for name, table in _tables().items() if table is None]
    return f" ({', '.join(missing)} is not part of this installation)" if missing else ""


def load_part(place: str, field: str, value: object) -> Any:
    """Imports `module:attribute` of Paceline.

    Args:
        place: The module and the attribute, without `paceline.`.
        field: The setting that needs the part.
        value: The value of the setting.

    Raises:
        ConfigError: If the module is not installed.
    """
    module, _, attribute = place.partition(":")
    return getattr(load_extension(module, field, value), attribute)


def check_new_name(name: object, *, taken: bool) -> None:
    """Checks the name of a new part. Raises ConfigError if a program cannot use the name."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        remedy = "begin with a to z; then a to z, digits and underscores"
        raise ConfigError("name", name, "is not a valid name", remedy)
    if taken:
        raise ConfigError("name", name, "is the name of a part of Paceline", "choose another name")


_registries: list[Registry[Any]] = []


@contextmanager
def temporary_registrations() -> Iterator[None]:
    """Returns a context whose end removes all parts registered inside it, except models."""
    before = {id(registry): registry.outside() for registry in _registries}
    try:
        yield
    finally:
        for registry in _registries:
            registry._outside = before.get(id(registry), {})


class Registry(Generic[Part]):
    """Parts of one kind by name; the module of a part is imported when the part is used.

    Args:
        kind: The name of the kind in the tables of extension packages.
        own: The parts of the core, or their places as `module:attribute`.
    """

    def __init__(self, kind: str, own: Mapping[str, Part | str]) -> None:
        self._kind = kind
        self._own = dict(own)
        self._loaded: dict[str, Part] = {}
        self._outside: dict[str, Part] = {}
        _registries.append(self)

    def __contains__(self, name: str) -> bool:
        return name in self._outside or self.is_installed(name)

    def is_installed(self, name: str) -> bool:
        """Returns True for a part of the core or of an extension package."""
        return name in self._own or name in provided(self._kind)

    def names(self) -> list[str]:
        """Returns the names of all parts: of the core, of programs, and of extension packages."""
        return [*self._own, *self._outside, *provided(self._kind)]

    def outside(self) -> dict[str, Part]:
        """Returns the parts that programs have registered, the latest last."""
        return dict(self._outside)

    def register(self, name: str, part: Part) -> None:
        """Registers a program's part; replaces an earlier part of the program with this name.

        Raises:
            ConfigError: If the name is not valid or belongs to an installed part.
        """
        check_new_name(name, taken=self.is_installed(name))
        self._outside[name] = part

    def check(self, name: str, field: str) -> None:
        """Checks that the setting `field` names a known part. The error has the nearest name."""
        if name not in self:
            hint = nearest(name, self.names()) + missing_packages()
            raise ConfigError(field, name, "unknown", hint)

    def get(self, name: str, field: str) -> Part:
        """Returns the part that the setting `field` names.

        Raises:
            ConfigError: If the name is unknown or its module is not installed.
        """
        self.check(name, field)
        if name in self._outside:
            return self._outside[name]
        if name not in self._loaded:
            part = self._own[name] if name in self._own else provided(self._kind)[name]
            self._loaded[name] = load_part(part, field, name) if isinstance(part, str) else part
        return self._loaded[name]
