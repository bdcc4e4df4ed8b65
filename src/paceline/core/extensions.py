"""Extensions: what the core loads only if a setting or a command asks for it.

The packages in `PACKAGES` list what they add in a table `PROVIDES`, by kind and name, such as the
strategy `asynchronous`; `register` adds something from outside. The core looks a name up when a setting
has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from paceline.core.errors import ConfigError, nearest

PACKAGES = ("alternatives", "rehearsal")
# What was registered from outside, by kind and name.
_registered: dict[tuple[str, str], Any] = {}
Part = TypeVar("Part")


def missing_extension(error: ImportError) -> str:
    """Returns the package or module of Paceline that an import did not find; "" if another is missing."""
    name = error.name or ""
    return name if name.startswith("paceline.") else ""


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


def register(kind: str, name: str, added: object) -> None:
    """Adds something of a kind under a name, in this process. A second call replaces the first."""
    _registered[kind, name] = added


def extension_names(kind: str) -> list[str]:
    """Returns all names of one kind, those that were registered last."""
    own = [name for package in PACKAGES for name in (_provides(package) or {}).get(kind, ())]
    return [*own, *(name for registered, name in _registered if registered == kind)]


def find_extension(kind: str, name: str, field: str) -> Any:
    """Returns what an extension adds under a name, or None if none does.

    Raises:
        ConfigError: If it belongs to a module that was removed; `field` is the setting that asks for it.
    """
    if (kind, name) in _registered:
        return _registered[kind, name]
    for package in PACKAGES:
        place = (_provides(package) or {}).get(kind, {}).get(name)
        if place is not None:
            return load_part(place, field, name)
    return None


def load_part(place: str, field: str, value: object) -> Any:
    """Imports `module:attribute` of Paceline, which the setting `field` asks for. Raises ConfigError if
    the module was removed."""
    module, _, attribute = place.partition(":")
    return getattr(load_extension(module, field, value), attribute)


def check_extension(kind: str, own: Collection[str], name: str, field: str) -> None:
    """Raises ConfigError for a name that neither the core, which has the names `own`, nor an extension
    has."""
    if name in own or name in (known := extension_names(kind)):
        return
    missing = [f"paceline.{package}" for package in PACKAGES if _provides(package) is None]
    without = f"; this installation has no {', '.join(missing)}" if missing else ""
    raise ConfigError(field, name, f"unknown{without}", nearest(name, (*own, *known)))


class Registry(Generic[Part]):
    """All parts of one kind by name: the core's own, and those that extensions add.

    Args:
        kind: The kind, as in the tables `PROVIDES`.
        own: The core's parts, or their places as `module:attribute`, imported when they are used.
    """

    def __init__(self, kind: str, own: Mapping[str, Part | str]) -> None:
        self.kind, self.own = kind, own

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in extension_names(self.kind)

    def names(self) -> list[str]:
        """Returns all names, the core's first."""
        return [*self.own, *extension_names(self.kind)]

    def register(self, name: str, part: Part) -> None:
        """Adds a part in this process. Raises ConfigError for a name of the core."""
        if name in self.own:
            raise ConfigError("name", name, "is one of Paceline's own", "choose another name")
        register(self.kind, name, part)

    def get(self, name: str, field: str) -> Part:
        """Returns the part that the setting `field` names.

        Raises:
            ConfigError: If the name is unknown, or if its module was removed.
        """
        own = self.own.get(name)
        found: Any = load_part(own, field, name) if isinstance(own, str) else own
        if found is None:
            found = find_extension(self.kind, name, field)
        if found is None:
            check_extension(self.kind, self.own, name, field)
        part: Part = found
        return part


def _provides(package: str) -> Mapping[str, Mapping[str, str]] | None:
    """The table of an extension package; None if the package was removed."""
    try:
        found: Mapping[str, Mapping[str, str]] = importlib.import_module(
            f"paceline.{package}"
        ).PROVIDES
    except ImportError as error:
        if not missing_extension(error):
            raise
        return None
    return found
