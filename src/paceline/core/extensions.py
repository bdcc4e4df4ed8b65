"""Loads extensions: packages that are only imported if a setting or a command needs them.

Each extension package lists its parts, such as optimizers or strategies, in `PROVIDES`. A `Registry`
looks up the parts of one kind by name: those of the core, of extension packages, and those that a
program registers.
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
    """Returns the name of the missing module of Paceline; "" if another package is missing."""
    name = error.name or ""
    return name if name.startswith("paceline.") else ""


@contextmanager
def needed_by(field: str, value: object) -> Iterator[None]:
    """Raises ConfigError if an import in the block fails because an extension is not installed."""
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
    """Returns what each extension package adds (`PROVIDES`); None for a package that is not installed."""
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
    """Returns what extension packages add of one kind, as `module:attribute` by name."""
    added: dict[str, str] = {}
    for table in _tables().values():
        added |= (table or {}).get(kind, {})
    return added


def missing_packages() -> str:
    """Returns a remark on extension packages that are not installed; empty if there are none."""
    missing = [f"paceline.{name}" for name, table in _tables().items() if table is None]
    return f" ({', '.join(missing)} is not part of this installation)" if missing else ""


def load_part(place: str, field: str, value: object) -> Any:
    """Imports an object of an extension package.

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
    """Raises ConfigError if a program cannot register an object under `name`."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        remedy = "begin with a to z; then a to z, digits and underscores"
        raise ConfigError("name", name, "is not a valid name", remedy)
    if taken:
        raise ConfigError("name", name, "is the name of a part of Paceline", "choose another name")


_registries: list[Registry[Any]] = []


@contextmanager
def temporary_registrations() -> Iterator[None]:
    """Returns a context at whose end all registrations made inside it are undone, except models."""
    before = {id(registry): registry.outside() for registry in _registries}
    try:
        yield
    finally:
        for registry in _registries:
            registry._outside = before.get(id(registry), {})


class Registry(Generic[Part]):
    """Finds objects of one kind, such as optimizers, by name, and imports them when they are used.

    Args:
        kind: The name of the kind in the tables of extension packages.
        own: The objects of the core, or their import paths as `module:attribute`.
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
        """Returns True if the core or an extension package has an object of this name."""
        return name in self._own or name in provided(self._kind)

    def names(self) -> list[str]:
        """Returns all names: of the core, of programs, and of extension packages."""
        return [*self._own, *self._outside, *provided(self._kind)]

    def outside(self) -> dict[str, Part]:
        """Returns the objects that programs have registered, the latest last."""
        return dict(self._outside)

    def register(self, name: str, part: Part) -> None:
        """Registers an object of a program; replaces an earlier one of the program with this name.

        Raises:
            ConfigError: If the name is not valid or is already used in Paceline.
        """
        check_new_name(name, taken=self.is_installed(name))
        self._outside[name] = part

    def check(self, name: str, field: str) -> None:
        """Raises ConfigError, with the most similar name, unless `name` is known."""
        if name not in self:
            hint = nearest(name, self.names()) + missing_packages()
            raise ConfigError(field, name, "unknown", hint)

    def get(self, name: str, field: str) -> Part:
        """Returns the object `name`, which the value of the setting `field` names.

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
