"""A schedule's rounds compiled for execution: where messages come from and go to. Torch-free.

In: one rank's rounds of one segment (`paceline.plan.steps`). Out: the same as operations with places in
memory: what is added arrives in an inbox, what replaces a span arrives in the segment itself, and what
changes while a slow peer may still be receiving it is sent from a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.plan.steps import Collective, Receive, Round, Rounds, Send, Span, Step


class Arrival(NamedTuple):
    """A `Receive` and where its messages go: to `inbox` elements into the memory for what is added, or
    straight to the segment. `batch`: the receives that are posted with it, where messages are batched."""

    step: Receive
    inbox: int
    batch: tuple[int, ...]


class Departure(NamedTuple):
    """A `Send`. From `copy` elements into the memory for copies, where the span changes while a slow peer
    may still be receiving it; `fill`: the copy is made now."""

    step: Send
    copy: int | None
    fill: bool


Op = Arrival | Departure | Round


class Program(NamedTuple):
    """One rank's rounds of one segment. `arrivals` are all receives in order; `inbox` and `copies` are
    elements of memory; `wide` is the span whose sums may stay in fp32."""

    rounds: tuple[tuple[Op, ...], ...]
    arrivals: tuple[Arrival, ...]
    inbox: int
    copies: int
    wide: Span
    collectives: tuple[Collective, ...]

    @property
    def is_collective(self) -> bool:
        return bool(self.collectives)


def compile_rounds(rounds: Rounds) -> Program:
    steps = [step for steps in rounds for step in steps]
    collectives = tuple(step for step in steps if isinstance(step, Collective))
    if collectives:
        assert len(collectives) == len(steps), "a schedule has messages or collectives"
        return Program((), (), 0, 0, (0, 0), collectives)
    arrivals: list[Arrival] = []
    compiled: list[tuple[Op, ...]] = []
    inbox = copies = 0
    copied: dict[Span, int] = {}
    changing = iter(_changes_later(steps))
    for round_ in rounds:
        ops: list[Op] = []
        run: list[int] = []
        for step in round_:
            changes = next(changing)
            if isinstance(step, Receive):
                if step.add:
                    copied = {s: at for s, at in copied.items() if not _overlap(s, step.span)}
                run.append(len(arrivals))
                arrivals.append(Arrival(step, inbox, ()))
                if step.add:
                    inbox += (step.span[1] - step.span[0]) * len(step.peers)
                ops.append(arrivals[-1])
                continue
            _close_batch(run, arrivals, ops)
            if isinstance(step, Round):
                ops.append(step)
            elif isinstance(step, Send):
                fill = changes and step.span not in copied
                if fill:
                    copied[step.span] = copies
                    copies += step.span[1] - step.span[0]
                ops.append(Departure(step, copied[step.span] if changes else None, fill))
        _close_batch(run, arrivals, ops)
        compiled.append(tuple(ops))
    wide = [s.span for s in steps if isinstance(s, Round) or (isinstance(s, Receive) and s.wide)]
    hull = (min(a for a, _ in wide), max(b for _, b in wide)) if wide else (0, 0)
    return Program(tuple(compiled), tuple(arrivals), inbox, copies, hull, ())


def _close_batch(run: list[int], arrivals: list[Arrival], ops: list[Op]) -> None:
    """Receives that follow one another are posted together: in parts, three ranks could wait for one
    another in a circle."""
    if run:
        arrivals[run[0]] = first = arrivals[run[0]]._replace(batch=tuple(run))
        ops[len(ops) - len(run)] = first
        run.clear()


def _changes_later(steps: Sequence[Step]) -> list[bool]:
    """For each step whether it is a `Send` of a span to which a later step adds."""
    found: list[bool] = []
    added: list[Span] = []
    for step in reversed(steps):
        if isinstance(step, Receive) and step.add:
            added.append(step.span)
        found.append(isinstance(step, Send) and any(_overlap(step.span, span) for span in added))
    return found[::-1]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
