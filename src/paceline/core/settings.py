"""Settings: frozen dataclasses that are built from plain tables, such as those of a TOML file.

`from_table` checks every value against the declared type. Its errors name `section.key`, the value and
the remedy.

A `Section` contains settings, and tables of settings that belong to an owner: an optimizer, a
strategy or an extension. For example, the table `[comm.hybrid]` of a recipe belongs to the owner
`hybrid`, and a flag names its setting as `comm.hybrid.sizes`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from paceline.core.errors import ConfigError, nearest
from paceline.core.extensions import Registry, load_part, missing_packages
from paceline.core.untrusted import LONGEST_S, ParseError, is_finite, parse_toml

Settings = TypeVar("Settings")


# Marks a field of a section that is not a setting.
NO_SETTING = {"setting": False}


@dataclass(frozen=True)
class Section:
    """Base class of sections that contain tables of settings for an optimizer, strategy or extension.

    This optimizer, strategy or extension is called the owner of its table.

    A subclass lists its owners in `OWNERS`, as name and `module:Class` inside `paceline`; the module is
    loaded if its table is given or if a setting in `CHOOSERS` names the owner. `register_settings` adds
    owners from outside the package. The class of an owner is a dataclass with defaults only. If the
    class has `EXCLUSIONS`, they are checked whenever its table is in use: if a setting has chosen
    the owner or, with `UNCHOSEN = True`, if the table is given.

    Owners may share a table. Their classes then have the same settings and name the table as
    `TABLE`, which is the name of one of these owners or another name in `OWNERS`. `UNREAD` lists
    the settings that an owner does not use.

    Attributes:
        owned: The settings of each owner that is given or chosen, by the name of its table.
    """

    NAME: ClassVar[str] = ""
    OWNERS: ClassVar[Mapping[str, str]] = {}
    CHOOSERS: ClassVar[tuple[str, ...]] = ()

    owned: Mapping[str, Any] = field(
        default_factory=dict, kw_only=True, hash=False, metadata=NO_SETTING
    )

    def __post_init__(self) -> None:
        owned = dict(self.owned)
        for chooser, name in self.choices():
            kind = settings_class(type(self), name, f"{self.NAME}.{chooser}")
            if kind is not None:
                table = table_name(kind, name)
                owned[table] = _as_kind(kind, owned.get(table))
        object.__setattr__(self, "owned", owned)

    @classmethod
    def gather(cls, **values: Any) -> Self:
        """Builds the section from values of its own settings and of the settings of chosen owners."""
        own = own_hints(cls)
        table = {name: values.pop(name) for name in own.keys() & values.keys()}
        defaults = {chooser: getattr(cls, chooser) for chooser in cls.CHOOSERS}
        for chooser, owner in cls.choices_in(defaults | table):
            kind = settings_class(cls, owner, f"{cls.NAME}.{chooser}")
            names = read_names(kind) & values.keys() if kind is not None else set()
            if names:
                table[table_name(kind, owner)] = {name: values.pop(name) for name in names}
        return from_table(cls, cls.NAME, table | values)

    def choices(self) -> Iterator[tuple[str, str]]:
        """Yields which setting chooses which optimizer or extension, as in ("name", "lars")."""
        return self.choices_in({chooser: getattr(self, chooser) for chooser in self.CHOOSERS})

    @classmethod
    def choices_in(cls, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields the same pairs as `choices` from a table of unchecked values; skips invalid values."""
        for chooser in cls.CHOOSERS:
            value = table.get(chooser)
            names = value if isinstance(value, list | tuple) else (value,)
            yield from ((chooser, name) for name in names if isinstance(name, str))

    def of(self, name: str, kind: type[Settings]) -> Settings:
        """Returns the settings of an optimizer, strategy or extension (the owner).

        Args:
            name: The owner.
            kind: The owner's settings class. Its defaults are returned if the owner is neither
                given nor chosen.
        """
        return _as_kind(kind, self.owned.get(table_name(kind, name)))

    def chosen(self, name: str) -> Any:
        """Returns the settings in the table `name` if it is given or chosen; None otherwise."""
        return self.owned.get(table_name(settings_class(type(self), name, self.NAME), name))

    def unused(self) -> list[str]:
        """Returns the names of the optional tables that are given although no setting has chosen them."""
        return [name for name in self.owned if name not in self._in_use()] if self.CHOOSERS else []

    def exclusions(self) -> Iterator[Any]:
        """Yields the exclusions that the classes of the tables in use declare."""
        for name in self._in_use():
            yield from getattr(self.owned.get(name), "EXCLUSIONS", ())

    def _in_use(self) -> list[str]:
        """Returns the names of the optional tables that a setting has chosen or that need no choice."""
        kinds = [(settings_class(type(self), name, by), name) for by, name in self.choices()]
        chosen = [table_name(kind, name) for kind, name in kinds]
        return [*chosen, *(n for n, own in self.owned.items() if getattr(own, "UNCHOSEN", False))]


# For each section, the classes of settings of extensions and programs, by owner.
_registries: dict[str, Registry[type]] = {}


def _owners(section: str) -> Registry[type]:
    return _registries.setdefault(section, Registry(f"{section} settings", {}))


def register_settings(section: str, owner: str, kind: type) -> None:
    """Makes the dataclass `kind` the settings of the table `[section.owner]`."""
    _owners(section).register(owner, kind)


def owner_names(section: type) -> list[str]:
    """Returns the names of all optimizers, strategies and so on that a section can have settings for."""
    if not issubclass(section, Section):
        return []
    return [*section.OWNERS, *sorted(_owners(section.NAME).names())]


def settings_class(section: type, owner: str, asked_by: str) -> type | None:
    """Returns the settings class of an optimizer, strategy or extension; None if it has no settings.

    Args:
        section: The class of the section.
        owner: The name of the optimizer, strategy or extension.
        asked_by: The setting or table that contains the name, for the message of the error.

    Raises:
        ConfigError: If it belongs to a package that was removed.
    """
    if not issubclass(section, Section):
        return None
    if owner in section.OWNERS:
        kind: type = load_part(section.OWNERS[owner], asked_by, owner)
        return kind
    registered = _owners(section.NAME)
    return registered.get(owner, asked_by) if owner in registered else None


def table_name(kind: type | None, owner: str) -> str:
    """Returns the name of the table of `owner`, whose settings class is `kind`."""
    return getattr(kind, "TABLE", "") or owner


def owner_tables(section: type) -> Iterator[tuple[str, type]]:
    """Yields the name and the settings class of each optional table of a section."""
    for owner in owner_names(section):
        kind = settings_class(section, owner, owner)
        if kind is not None and table_name(kind, owner) == owner:
            yield owner, kind


def read_names(kind: type) -> set[str]:
    """Returns the names of the settings in a class that its owner uses."""
    return own_hints(kind).keys() - set(getattr(kind, "UNREAD", ()))


def _as_kind(kind: type[Settings], given: Any) -> Settings:
    """Converts `given` to the settings class `kind`; returns the defaults of `kind` for None."""
    if type(given) is kind:
        return given
    names = own_hints(type(given)) if given is not None else ()
    return kind(**{name: getattr(given, name) for name in names})


def from_table(cls: type[Settings], section: str, table: Mapping[str, Any]) -> Settings:
    """Builds settings from a table; missing keys get their default values.

    Args:
        cls: The class of the settings.
        section: The name of the section, for messages.
        table: The values.

    Raises:
        ConfigError: If a key is unknown, or a value has a wrong type.
    """
    hints = own_hints(cls)
    if not isinstance(table, Mapping):
        raise ConfigError(section, table, "is not a table", f"write it as [{section}]")
    values: dict[str, Any] = {}
    owned: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{section}.{key}"
        if key in hints:
            values[key] = convert(value, hints[key], name)
        elif (
            key in owner_names(cls)
            and (kind := settings_class(cls, key, name)) is not None
            and table_name(kind, key) == key
        ):
            owned[key] = from_table(kind, name, value)
        else:
            known = [*hints, *owner_names(cls)]
            missing = missing_packages() if issubclass(cls, Section) else ""
            raise ConfigError(name, None, "unknown setting", nearest(key, known) + missing)
    if owned:
        values["owned"] = owned
    assert dataclasses.is_dataclass(cls)
    for entry in dataclasses.fields(cls):
        optional = (entry.default, entry.default_factory) != (dataclasses.MISSING,) * 2
        if entry.name not in values and not optional:
            raise ConfigError(f"{section}.{entry.name}", None, "is missing")
    return cls(**values)


def own_hints(cls: type) -> dict[str, Any]:
    """Returns the names and types of the settings that a class declares itself."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {f.name: hints[f.name] for f in fields if f.metadata.get("setting", True)}


def to_table(settings: object) -> dict[str, Any]:
    """Returns the settings as a table, without unset values, because TOML has no null."""
    table: dict[str, Any] = {}
    for name in own_hints(type(settings)):
        value = getattr(settings, name)
        if value is not None:
            table[name] = list(value) if isinstance(value, tuple) else value
    if isinstance(settings, Section):
        tables = {owner: to_table(own) for owner, own in settings.owned.items()}
        table |= {owner: own for owner, own in tables.items() if own}
    return table


def convert(value: Any, hint: Any, name: str) -> Any:
    """Converts the value of a setting to the declared type.

    The only conversions are integers to floats, lists to tuples, and tables to dataclasses.

    Args:
        value: The value from a table.
        hint: The declared type.
        name: The name of the setting, for messages.

    Raises:
        ConfigError: If the value cannot be converted to the declared type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return convert(value, inner, name)
    if origin is tuple:
        return _tuple(value, arguments, name)
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(name, value, f"is a {type(value).__name__}", "give a list")
        return [convert(item, arguments[0], f"{name}[{n}]") for n, item in enumerate(value)]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_table(hint, name, value)
    if hint is float and type(value) in (int, float):
        if not is_finite(value):
            raise ConfigError(name, value, "is not a finite number", "give a number")
        return float(value)
    if hint is int and type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(name, value, "does not fit 64 bits", "give a smaller number")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(name, value, f"is a {type(value).__name__}", f"give {_KINDS[hint]}")
    return value


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
}


def _tuple(value: Any, arguments: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        value = [value]
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if len(value) != len(arguments):
        raise ConfigError(name, value, f"has {len(value)} values", f"give {len(arguments)}")
    return tuple(
        convert(item, hint, f"{name}[{n}]" if dataclasses.is_dataclass(hint) else name)
        for n, (item, hint) in enumerate(zip(value, arguments, strict=True))
    )


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"run.seed": 1}` for `{"run": {"seed": 1}}`."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"run": {"seed": 1}}` for `{"run.seed": 1}`."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, key = name.split(".")
        table = tables
        for part in path:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                problem = f"{part} is a setting, not a table"
                raise ConfigError(name, value, problem, "remove one of them")
            table = inner
        if isinstance(table.get(key), dict):
            raise ConfigError(name, value, "is a table, not a setting", "name one of its settings")
        table[key] = value
    return tables


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `below`, updated by `above`, key by key and recursively."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        inner = isinstance(lower, Mapping) and isinstance(value, Mapping)
        merged[key] = merge_tables(lower, value) if inner else value  # type: ignore[arg-type]
    return {k: merge_tables(v, {}) if isinstance(v, Mapping) else v for k, v in merged.items()}


# Ranges of numbers, by their text in messages. NaN is in none of them.
_LIMITS: dict[str, Callable[[float], bool]] = {
    "0 or more": lambda value: 0 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "at least 1": lambda value: 1 <= value < math.inf,
    "at least 2": lambda value: 2 <= value < math.inf,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1]": lambda value: 0 <= value <= 1,
}


class SettingChecks:
    """Checks the values of a section's settings; a setting that is None passes all checks.

    Args:
        section: The name of the section, for messages.
        settings: The object with the values.
    """

    def __init__(self, section: str, settings: object) -> None:
        self._section = section
        self._settings = settings

    def known(self, name: str, known: Iterable[str]) -> None:
        """Raises ConfigError, with the most similar name, unless the value of `name` is in `known`."""
        known, value = tuple(known), getattr(self._settings, name)
        if value not in known:
            raise self.error(name, "unknown", nearest(str(value), known))

    def number(self, name: str, limits: str, remedy: str = "") -> None:
        """Raises ConfigError unless the value of `name` is within the limits, such as `above 0`."""
        value = getattr(self._settings, name)
        if value is not None and not _LIMITS[limits](value):
            raise self.error(name, f"must be {limits}", remedy)

    def error(self, name: str, problem: str, remedy: str = "") -> ConfigError:
        """Returns the error for the value of the setting `name`."""
        value = getattr(self._settings, name)
        return ConfigError(f"{self._section}.{name}", value, problem, remedy)


def check_input_rate(images_per_s: float, flag: str = "--input-images-per-s") -> None:
    """Raises ConfigError unless a rank's input rate in images per second is valid; 0 is no limit."""
    # The rate minus its uncertainty must be possible, too.
    least = 10 / LONGEST_S
    if images_per_s and not least <= images_per_s < math.inf:
        raise ConfigError(
            flag, images_per_s, f"must be 0, or finite and at least {least:g}",
            "give the images/s of one rank, such as 2000",
        )  # fmt: skip


@contextmanager
def errors_of_file(field: str, path: Path | str, syntax: str, remedy: str) -> Iterator[None]:
    """Converts all errors in the block, which reads a TOML file, to a ConfigError that names the file.

    Args:
        field: The setting or flag that named the file.
        path: The file.
        syntax: The remedy for a file that is not TOML.
        remedy: The remedy for invalid contents whose error has no remedy.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(field, str(path), problem, "check the path") from None
    except ParseError as error:
        problem = f"cannot be read (is not TOML: {error})"
        raise ConfigError(field, str(path), problem, syntax) from None
    except ConfigError as error:
        raise ConfigError(field, str(path), error.cause, error.remedy or remedy) from None


def parse_arguments(name: str, text: str) -> dict[str, Any]:
    """Parses the keyword arguments in the setting `name`, a TOML table such as `{width = 2}`."""
    if not text.strip():
        return {}
    remedy = "write it as {name = value}"
    try:
        value = parse_toml(f"value = {text}".encode(errors="replace"))["value"]
    except ParseError as error:
        raise ConfigError(name, text, f"is not TOML ({error})", remedy) from None
    if not isinstance(value, dict):
        raise ConfigError(name, text, "is not a table", remedy)
    return value
