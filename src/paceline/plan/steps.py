"""The vocabulary of schedules: steps, groups of ranks, segments of a buffer; and programs, which are
schedules compiled for execution.

A schedule (`paceline.plan.schedules`) is a generator of steps for one rank and one segment of a buffer. A
step is a message (`Send`, `Receive`), a collective of a sub-group (`Collective`), a local rounding
(`Round`), or `PAUSE`, the end of a round. A program has the same as operations with places in memory:
what is added arrives in an inbox, what replaces a span arrives in the segment itself, and what changes
while a slow peer may still be receiving it is sent from a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

MIB = 1024 * 1024
Span = tuple[int, int]
CollectiveKind = Literal["reduce", "broadcast", "all_reduce", "reduce_scatter", "all_gather"]


class Send(NamedTuple):
    """The elements of `span` to `peer`."""

    peer: int
    span: Span


class Receive(NamedTuple):
    """A message of `span` from each of `peers`. One replaces the span, or all are added to it.

    They are added in the order given, this rank's own numbers in the place `own`; the sum of 16-bit
    numbers is made in fp32 and rounded once. `wide` leaves it in fp32 until `Round`.
    """

    peers: tuple[int, ...]
    span: Span
    add: bool = False
    own: int = 0
    wide: bool = False


class Round(NamedTuple):
    """Rounds the wide sums of `span` to the format of the messages."""

    span: Span


class Collective(NamedTuple):
    """The backend's own collective among `members`, the first of them the root. `beside`: how many of
    these run side by side on a node and share its links."""

    kind: CollectiveKind
    members: tuple[int, ...]
    span: Span
    beside: int = 1


class Pause(NamedTuple):
    """The end of a round."""


PAUSE: Final = Pause()
Step = Send | Receive | Round | Collective | Pause
Steps = Iterator[Step]
Rounds = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Groups:
    """The ranks of each group, which are the nodes unless a group size was set. `nested`: the backend's
    own collectives run in parts of the cluster, as over NCCL."""

    groups: tuple[tuple[int, ...], ...]
    nested: bool = False

    @classmethod
    def of_nodes(cls, counts: Sequence[int], *, nested: bool = False) -> Groups:
        """Ranks in ascending order, `counts` on each node."""
        ends = [sum(counts[: at + 1]) for at in range(len(counts))]
        nodes = zip(ends, counts, strict=True)
        return cls(tuple(tuple(range(end - n, end)) for end, n in nodes), nested)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, group by group: a ring in this order crosses each node's link once."""
        return tuple(rank for group in self.groups for rank in group)

    @cached_property
    def masters(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """As many as the largest group has ranks; column c holds each group's owner of chunk c. A rank
        of a small group stands in several."""
        width = max(len(group) for group in self.groups)
        return tuple(
            tuple(group[column % len(group)] for group in self.groups) for column in range(width)
        )

    @cached_property
    def is_uniform(self) -> bool:
        return len({len(group) for group in self.groups}) == 1

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The group that `rank` belongs to."""
        return next(group for group in self.groups if rank in group)


class Segment(NamedTuple):
    """`length` elements of `item_bytes`; `number` counts the segments of a buffer."""

    length: int
    item_bytes: int = 4
    number: int = 0


Schedule = Callable[[int, Groups, Segment], Steps]


@dataclass(frozen=True)
class Algorithm:
    """A schedule, and how a buffer is cut for it: into `depth` segments, which are under way together,
    unless they would be shorter than `least_bytes`; into more where they would be longer than
    `most_bytes`. `tuned`: `paceline tune` tries it unless told otherwise."""

    name: str
    schedule: Schedule
    depth: int = 2
    least_bytes: int = MIB
    most_bytes: int = 8 * MIB
    tuned: bool = True

    def rounds(self, rank: int, groups: Groups, segment: Segment) -> Rounds:
        """The steps of `rank`, round by round, without messages of no elements."""
        rounds: list[list[Step]] = [[]]
        for step in self.schedule(rank, groups, segment):
            if isinstance(step, Pause):
                rounds.append([])
            elif step.span[0] < step.span[1]:
                rounds[-1].append(step)
        return tuple(tuple(steps) for steps in rounds)

    def segments(self, length: int, item_bytes: int) -> list[Span]:
        size = length * item_bytes
        most = min(self.depth, max(1, size // self.least_bytes))
        return cut((0, length), max(most, -(-size // self.most_bytes)))


def interleave(counts: Sequence[int], depth: int) -> Iterator[tuple[int, int, int]]:
    """(segment, lane, round) in the order in which all ranks take them; `counts` are the rounds of each
    segment. At most `depth` segments are under way, each on a lane of its own.

    Half of them begin in the same pass: then a link has several messages to carry from the first
    round to the last, and the other half keeps it busy while new segments begin.
    """
    free = deque(range(depth))
    active: deque[tuple[int, int, int]] = deque()
    admitted = 0
    while admitted < len(counts) or active:
        for _ in range(min(max(1, depth // 2), len(counts) - admitted, len(free))):
            active.append((admitted, free.popleft(), 0))
            admitted += 1
        for _ in range(len(active)):
            segment, lane, number = active.popleft()
            yield segment, lane, number
            if number + 1 < counts[segment]:
                active.append((segment, lane, number + 1))
            else:
                free.append(lane)


def cut(span: Span, parts: int) -> list[Span]:
    """`parts` spans of nearly equal length, some empty where there is less to cut."""
    start, length = span[0], span[1] - span[0]
    return [
        (start + length * at // parts, start + length * (at + 1) // parts) for at in range(parts)
    ]


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
