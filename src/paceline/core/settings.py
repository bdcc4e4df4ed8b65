"""Settings: frozen dataclasses read from plain tables, such as TOML gives.

In: a dataclass type, its section's name and a table of values. Out: an instance whose every value has
the declared type, or a `ConfigError` that names `section.key`, the value and what would do.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from paceline.core.errors import ConfigError, nearest
from paceline.core.untrusted import LONGEST_S, ParseError, is_finite, parse_toml

Settings = TypeVar("Settings")


def from_table(cls: type[Settings], section: str, table: Mapping[str, Any]) -> Settings:
    """Builds `cls`; unknown keys and wrong types fail, absent keys keep their default."""
    hints = typing.get_type_hints(cls)
    if not isinstance(table, Mapping):
        raise ConfigError(section, table, "is not a table", f"write it as [{section}]")
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(f"{section}.{key}", None, "unknown setting", nearest(key, hints))
        values[key] = convert(value, hints[key], f"{section}.{key}")
    assert dataclasses.is_dataclass(cls)
    for field in dataclasses.fields(cls):
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in values and not optional:
            raise ConfigError(f"{section}.{field.name}", None, "is missing")
    return cls(**values)


def to_table(settings: object) -> dict[str, Any]:
    """The inverse of `from_table`; TOML has no null, so unset values are left out."""
    assert dataclasses.is_dataclass(settings)
    table = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return table


def convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as `hint` says. An integer may stand for a float, a list for a tuple, a table for a
    dataclass; nothing else."""
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


def flatten(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`{"run": {"seed": 1}}` → `{"run.seed": 1}`, for comparing and for showing."""
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        for key, value in table.items()
    }


# What a number may be, as the message says it. Written so that NaN is in none.
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
    """Checks of the values of one section; an unset value passes."""

    def __init__(self, section: str, settings: object) -> None:
        self._section = section
        self._settings = settings

    def known(self, name: str, known: Iterable[str]) -> None:
        """Raises ConfigError, with the nearest name, where the value is none of `known`."""
        known, value = tuple(known), getattr(self._settings, name)
        if value not in known:
            raise self.error(name, "unknown", nearest(str(value), known))

    def number(self, name: str, limits: str, remedy: str = "") -> None:
        """Raises ConfigError where the value is not, say, `above 0`."""
        value = getattr(self._settings, name)
        if value is not None and not _LIMITS[limits](value):
            raise self.error(name, f"must be {limits}", remedy)

    def error(self, name: str, problem: str, remedy: str = "") -> ConfigError:
        """For the caller to raise."""
        value = getattr(self._settings, name)
        return ConfigError(f"{self._section}.{name}", value, problem, remedy)


def check_input_rate(images_per_s: float, flag: str = "--input-images-per-s") -> None:
    """ConfigError for a rate of a rank with which no step has a time; 0: the input keeps up."""
    # A rate that is off by its uncertainty has a time, too.
    least = 10 / LONGEST_S
    if images_per_s and not least <= images_per_s < math.inf:
        raise ConfigError(
            flag, images_per_s, f"must be 0, or finite and at least {least:g}",
            "state the images/s that one rank gets, such as 2000",
        )  # fmt: skip


def parse_arguments(name: str, text: str) -> dict[str, Any]:
    """Keyword arguments that the setting `name` has as a TOML table: `{width = 2}`."""
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
