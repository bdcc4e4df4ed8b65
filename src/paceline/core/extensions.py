"""Extensions: what the core loads only if a setting or a command asks for it.

Extension packages have a table of what their modules provide. A `Registry` looks up the names of one
kind: the core's own parts, those of these tables, and those that a program registers.
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
    """Returns the part of Paceline that an import did not find; "" if another package is missing."""
    name = error.name or ""
    return name if name.startswith("paceline.") else ""


@contextmanager
def needed_by(field: str, value: object) -> Iterator[None]:
    """Raises ConfigError if an import inside of it needs an extension package that was removed."""
    try:
        yield
    except ModuleNotFoundError as error:
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


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]] | None]:
    """Returns the table of each extension package; None for one that was removed."""
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
    """Returns what extension packages add to a kind, as name and `module:attribute`."""
    added: dict[str, str] = {}
    for table in _tables().values():
        added |= (table or {}).get(kind, {})
    return added


def missing_packages() -> str:
    """Returns a remark on extension packages that were removed; empty if there are none."""
    missing = [f"paceline.{name}" for name, table in _tables().items() if table is None]
    return f" ({', '.join(missing)} is not part of this installation)" if missing else ""


def load_part(place: str, field: str, value: object) -> Any:
    """Imports `module:attribute` of Paceline. Raises ConfigError if the module was removed."""
    module, _, attribute = place.partition(":")
    return getattr(load_extension(module, field, value), attribute)


def check_new_name(name: object, *, taken: bool) -> None:
    """Raises ConfigError for a name that a program cannot give to a part."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        problem, remedy = (
            "cannot be a name",
            "begin with a to z; then a to z, digits and underscores",
        )
        raise ConfigError("name", name, problem, remedy)
    if taken:
        raise ConfigError("name", name, "is one of Paceline's own", "choose another name")


_registries: list[Registry[Any]] = []


@contextmanager
def temporary_registrations() -> Iterator[None]:
    """Undoes at its end what was registered inside, of every kind but models."""
    before = {id(registry): registry.outside() for registry in _registries}
    try:
        yield
    finally:
        for registry in _registries:
            registry.replace_outside(before.get(id(registry), {}))


class Registry(Generic[Part]):
    """Parts of one kind by name; modules of parts are imported when a part is used.

    Args:
        kind: The name of the kind in the tables of extension packages.
        own: The core's parts, or their places as `module:attribute`.
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
        """Returns all names: the core's, those from outside, those of extension packages."""
        return [*self._own, *self._outside, *provided(self._kind)]

    def outside(self) -> dict[str, Part]:
        """Returns the parts that programs have registered, the latest last."""
        return dict(self._outside)

    def replace_outside(self, parts: Mapping[str, Part]) -> None:
        """Puts `parts` in place of what programs have registered."""
        self._outside = dict(parts)

    def register(self, name: str, part: Part) -> None:
        """Adds a part from outside of the package, or replaces it. Raises ConfigError for a name that
        cannot be, or that is installed."""
        check_new_name(name, taken=self.is_installed(name))
        self._outside[name] = part

    def check(self, name: str, field: str) -> None:
        """Raises ConfigError, with the nearest name, for a name that the setting `field` cannot have."""
        if name not in self:
            hint = nearest(name, self.names()) + missing_packages()
            raise ConfigError(field, name, "unknown", hint)

    def get(self, name: str, field: str) -> Part:
        """Returns the part that the setting `field` names.

        Raises:
            ConfigError: If the name is unknown, or if its module was removed.
        """
        self.check(name, field)
        if name in self._outside:
            return self._outside[name]
        if name not in self._loaded:
            part = self._own[name] if name in self._own else provided(self._kind)[name]
            self._loaded[name] = load_part(part, field, name) if isinstance(part, str) else part
        return self._loaded[name]
