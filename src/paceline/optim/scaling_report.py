"""Describes the choices of the scaling rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """A setting that the rule has changed, its value and the reason."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Scaling:
    """Result of the scaling rule.

    Attributes:
        choices: Settings that the rule has changed.
        headline: Batch and number of steps.
        kept: Settings of the user that the rule would have changed otherwise.
        notes: Further remarks, such as an expected loss of accuracy.
    """

    choices: tuple[Choice, ...]
    headline: str
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The values by setting."""
        return {choice.name: choice.value for choice in self.choices}

    def describe(self) -> str:
        """Returns one line; `describe_in_lines` breaks it for the terminal."""
        parts = [f"{c.name} = {c.value} ({c.reason})" for c in self.choices]
        parts = parts or ["no setting changed"]
        if self.kept:
            parts.append(f"kept as given: {', '.join(self.kept)}")
        return f"{self.headline}: " + _SEPARATOR.join([*parts, *self.notes])


_SEPARATOR = "; "


def describe_in_lines(described: str, indent: str) -> str:
    """Breaks the description of a `Scaling`.

    Args:
        described: Result of `Scaling.describe`.
        indent: Start of each line but the first.

    Returns:
        The headline, and a line for each choice.
    """
    headline, colon, choices = described.partition(": ")
    lines = choices.split(_SEPARATOR)
    return headline + colon.rstrip() + "".join(f"\n{indent}{line}" for line in lines)
