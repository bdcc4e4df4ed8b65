"""The closed forms of overlap: when exchanges start and end, and how long an iteration lasts.

In: times of one iteration. Out: start and end of each exchange on one channel, the part that backward
does not hide, and the three iteration times of the DAG model (Shi et al. 2018). The simulator agrees
with them where they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Of one buffer; `start_s` is from the start of the backward pass."""

    ready_s: float
    start_s: float
    end_s: float


def exchanges(ready_s: Sequence[float], cost_s: Sequence[float]) -> list[Exchange]:
    """One after the other, in order, each once its buffer is ready."""
    found: list[Exchange] = []
    free = 0.0
    for ready, cost in zip(ready_s, cost_s, strict=True):
        start = max(free, ready)
        free = start + cost
        found.append(Exchange(ready, start, free))
    return found


def exposed_s(ready_s: Sequence[float], cost_s: Sequence[float], backward_s: float) -> float:
    """What is left of the exchanges once backward is over."""
    made = exchanges(ready_s, cost_s)
    return max(0.0, made[-1].end_s - backward_s) if made else 0.0


@dataclass(frozen=True)
class StepTimes:
    """The parts of one rank's iteration, all in seconds; but `hidden_cost`, what a second of an exchange
    costs the compute that hides it."""

    input_s: float
    copy_s: float
    forward_s: float
    backward_s: float
    update_s: float
    ready_s: tuple[float, ...] = ()
    cost_s: tuple[float, ...] = ()
    hidden_cost: float = 0.0

    def serial(self) -> float:
        """Nothing overlaps."""
        return self.input_s + self.copy_s + self._compute() + sum(self.cost_s)

    def prefetched(self) -> float:
        """Input of the next iteration while this one computes; exchanges after backward."""
        return max(self.input_s + self.copy_s, self._compute() + sum(self.cost_s))

    def overlapped(self) -> float:
        """Input and exchanges both hidden as far as they can be."""
        exposed = exposed_s(self.ready_s, self.cost_s, self.backward_s)
        return max(self.input_s + self.copy_s, self._compute() + exposed + self.slowed_s())

    def slowed_s(self) -> float:
        """By how much the exchanges that backward hides make it longer. They are taken to be slowed as
        much, so that what is exposed stays."""
        exposed = exposed_s(self.ready_s, self.cost_s, self.backward_s)
        return self.hidden_cost * max(0.0, sum(self.cost_s) - exposed)

    def _compute(self) -> float:
        return self.forward_s + self.backward_s + self.update_s
