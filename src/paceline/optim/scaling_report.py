"""What the scaling rule says: its choices with their reasons, and what a run at few steps per epoch loses
against the best small batch, as far as it was measured. docs/large-batch.md has the runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Choice(NamedTuple):
    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Scaling:
    """What the rule chose, which settings of the user it left as they are, and what it expects to be
    lost."""

    choices: tuple[Choice, ...]
    losses: tuple[str, ...]
    headline: str
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        return {choice.name: choice.value for choice in self.choices}

    def describe(self) -> str:
        """One line; `describe_in_lines` breaks it for the terminal."""
        parts = [f"{c.name} = {c.value} ({c.reason})" for c in self.choices]
        if not parts:
            parts = [f"all {'other ' if self.kept else ''}settings as in the recipe"]
        if self.kept:
            parts.append(f"kept as given: {', '.join(self.kept)}")
        parts += [*self.notes, *(f"expect a loss: {loss}" for loss in self.losses)]
        return f"{self.headline}: " + _BETWEEN.join(parts)


_BETWEEN = "; "


def describe_in_lines(described: str, indent: str) -> str:
    """The description of a `Scaling`, with a line for each choice."""
    headline, colon, choices = described.partition(": ")
    lines = choices.split(_BETWEEN)
    return headline + colon.rstrip() + "".join(f"\n{indent}{line}" for line in lines)


# Lost by optimizers other than Muon at few steps an epoch, against the best small batch, which is Muon's
# with 93.6 % in records/alternatives, where each had three tries of its rate (also
# records/cifar10 and records/large-batch; 16 to 90 epochs).
_LOST = {
    "sgd": "up to 12 points at 20, 40 or more at 5",
    "lars": "up to 5 points at 20, 1 to 40 at 5",
    "adamw": "7 points at 20, 22 at 5 on CIFAR-10 in 16 epochs",
    "lamb": "6 points at 20, 25 at 5 on CIFAR-10 in 16 epochs",
}


MUON_LOSES_LESS = " (muon loses less)"
# Small nets against themselves at the small batch (records/large-batch-small-nets: growth with
# AdamW at one rate, Muon from AdamW at another).
_GROWN_WITH = "more below, against the same optimizer at the small batch of small nets in 15 epochs"
_LOST_GROWN = {
    "adamw": f"0.6 to 1.3 points at 20, 0.3 to 5.3 at 6, {_GROWN_WITH}",
    "lamb": f"1.7 points at 6, {_GROWN_WITH}",
}
_WITH = " (with ResNets)"


def expected_loss(name: str, steps: float, total: int, short: bool, grows: bool) -> str:
    """In points of top-1. `steps` per epoch and `total` steps are those of the whole batch; `grows`: the
    run begins with a smaller one; `short`: it is too short for mixed images."""
    if name in _LOST:
        lost = _LOST_GROWN[name] if grows else _LOST[name]
        return f"{steps:.3g} steps an epoch with {name}: {lost}"
    if not short:
        lost = "up to 0.7 points at 20, up to 2 at 5" if grows else "up to 2.3 points at 5 to 20"
        return f"{steps:.3g} steps an epoch: {lost}, more below{_WITH}"
    of = f"{total} steps of the whole batch in all"
    if grows:
        return f"{of}: up to 1.6 points at 600, up to 3 at 150, more below{_WITH}"
    lost = "1 to 5.5 points at 150, more below" if total < 450 else "up to 2.5 points at 600"
    return f"{of}: {lost}{_WITH}"
