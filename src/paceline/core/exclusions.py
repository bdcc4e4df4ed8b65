"""Defines how packages declare settings that exclude each other, and checks these declarations.

Each `Exclusion` refuses one combination of settings. The package that owns a setting declares the
exclusions within its own section. `paceline.config.exclusions` declares the exclusions between
settings of different sections, and between settings and facts about the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError

Test = Callable[[Any], bool]


def one_of(*values: object) -> Test:
    return lambda value: value in values


def not_in(*values: object) -> Test:
    return lambda value: value not in values


def above(limit: float) -> Test:
    return lambda value: value > limit


@dataclass(frozen=True)
class Exclusion:
    """Refuses a value of `field` while all conditions in `when` hold.

    Attributes:
        field: A setting, as in `comm.wire` or `comm.hybrid.sizes`, or an object of the program, as in
            `program.augment`.
        refused: Returns True for a value that is refused.
        when: Other settings and facts, each with a test of its value.
        problem: The reason. A name in braces, as in `{optim.name}`, is replaced by its value.
        remedy: What the user can do.
    """

    field: str
    refused: Test
    when: Mapping[str, Test]
    problem: str
    remedy: str


def switched_off(fields: Mapping[str, object], problem: str) -> tuple[Exclusion, ...]:
    """Returns exclusions that refuse every value of a setting except the given value."""
    return tuple(
        Exclusion(
            field, not_in(value), {}, problem,
            f"use {field}={str(value).lower() if isinstance(value, bool) else value or repr(value)}",
        )
        for field, value in fields.items()
    )  # fmt: skip


def check_exclusions(rows: Iterable[Exclusion], **sections: object) -> None:
    """Raises ConfigError for the first combination of settings that an exclusion refuses.

    Skips an exclusion that names a section or a table of settings that is not in use.

    Args:
        rows: The exclusions to check.
        sections: The settings objects and facts, by the first part of the setting names.

    Raises:
        ConfigError: If a combination is refused.
    """

    def values(name: str) -> list[Any]:
        """Returns the value of a setting in a list; the list is empty if the setting is not in use."""
        section, *owner, key = name.split(".")
        settings = sections.get(section)
        if owner:
            settings = getattr(settings, "owned", {}).get(owner[0])
        return [] if settings is None else [getattr(settings, key)]

    for row in rows:
        tests = {row.field: row.refused, **row.when}
        given = {name: values(name) for name in tests}
        if all(given.values()) and all(test(given[name][0]) for name, test in tests.items()):
            own = row.field.removeprefix("program.")
            shown = None if own != row.field else given[row.field][0]
            raise ConfigError(
                own, list(shown) if isinstance(shown, tuple) else shown,
                row.problem.format(**sections), row.remedy.format(**sections),
            )  # fmt: skip
