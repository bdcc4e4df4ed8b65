"""Describes the choices of the scaling rule and the accuracy loss that was measured in such runs.

docs/large-batch.md has the runs.
"""

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
        losses: Expected losses of accuracy.
        headline: Batch and number of steps.
        kept: Settings of the user that the rule would have changed otherwise.
        notes: Reasons of choices that are not settings.
    """

    choices: tuple[Choice, ...]
    losses: tuple[str, ...]
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
        parts += [*self.notes, *(f"expect a loss: {loss}" for loss in self.losses)]
        return f"{self.headline}: " + _SEPARATOR.join(parts)


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


# Points of top-1 that a large batch loses against the best small batch, which is Muon's with 93.6 % on
# CIFAR-10 (records 2026-11-17_field_h200, 2026-11-15_cifar10_h200 and 2026-11-17_large-batch_h200).
_LOST = {
    "sgd": "up to 12 points at 20, 40 or more at 5",
    "lars": "up to 5 points at 20, 1 to 40 at 5",
    "adamw": "7 points at 20, 22 at 5",
    "lamb": "6 points at 20, 25 at 5",
}
# With a batch that grows, against the same optimizer at the small batch: small nets, 15 epochs (records
# 2026-11-18_growth-with-adam_2-core-cpu and 2026-11-18_muon-from-adam_2-core-cpu).
_LOST_GROWN = {"adamw": "0.6 to 1.3 points at 20, 0.3 to 5.3 at 6", "lamb": "1.7 points at 6"}


def expected_loss(name: str, steps: float, total: int, short: bool, grows: bool) -> str:
    """Returns the loss that was measured in similar runs.

    Args:
        name: Optimizer.
        steps: Steps per epoch at the whole batch.
        total: Steps in total at the whole batch.
        short: True if the run is too short for mixed images.
        grows: True if the run begins with a smaller batch.
    """
    if name in _LOST:
        lost = _LOST_GROWN[name] if grows else _LOST[name]
        return f"{steps:.3g} steps per epoch with {name}: {lost}"
    if not short:
        lost = "up to 0.7 points at 20, up to 2 at 5" if grows else "up to 2.3 points at 5 to 20"
        return f"{steps:.3g} steps per epoch: {lost}, more below (with ResNets)"
    lost = "up to 1.6 points at 600, up to 3 at 150"
    if not grows:
        lost = "up to 2.5 points at 600, 1 to 5.5 at 150"
    return f"{total} steps of the whole batch in all: {lost}, more below (with ResNets)"
