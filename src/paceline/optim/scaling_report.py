"""Describes the settings that `optim.scaling` has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """A setting that `optim.scaling` has changed, its new value and the reason."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Scaling:
    """The settings that `optim.scaling` has changed, and remarks.

    Attributes:
        choices: The changed settings with reasons.
        headline: Text with the old and new batch and the number of steps.
        kept: Names of settings that were not changed, because the user has given them.
        notes: Further remarks, such as an expected loss of accuracy.
    """

    choices: tuple[Choice, ...]
    headline: str
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The new value of each changed setting, by name."""
        return {choice.name: choice.value for choice in self.choices}

    def describe(self) -> str:
        """Describes the scaling in one line, which `describe_in_lines` can break into several."""
        parts = [f"{c.name} = {c.value} ({c.reason})" for c in self.choices]
        parts = parts or ["no setting changed"]
        if self.kept:
            parts.append(f"kept as given: {', '.join(self.kept)}")
        return f"{self.headline}: " + _SEPARATOR.join([*parts, *self.notes])


_SEPARATOR = "; "


def describe_in_lines(described: str, indent: str) -> str:
    """Breaks the description of a `Scaling` into lines.

    Args:
        described: Result of `Scaling.describe`.
        indent: Start of each line except the first.

    Returns:
        The headline, followed by one line per choice or note.
    """
    headline, colon, choices = described.partition(": ")
    lines = choices.split(_SEPARATOR)
    return headline + colon.rstrip() + "".join(f"\n{indent}{line}" for line in lines)
