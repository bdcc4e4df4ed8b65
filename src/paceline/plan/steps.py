"""The steps of an all-reduce schedule, and their compilation to programs that ranks execute.

A schedule (`paceline.plan.schedules`) is a generator of steps for one rank and one segment of a
buffer. A step is a message (`Send`, `Receive`), a collective of a sub-group (`Collective`), a local
rounding (`Round`), or `PAUSE`, the end of a round. A program contains the same steps as operations
with memory addresses. A span is a range of elements of the buffer. A received message that is added
to a span is first written to separate memory, the inbox. A message that replaces a span is written
into the segment directly. If a span changes while a slow peer may still be receiving the span, a
copy is sent instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from paceline.plan.cost import Cost

MIB = 1024 * 1024
Span = tuple[int, int]
CollectiveKind = Literal["reduce", "broadcast", "all_reduce", "reduce_scatter", "all_gather"]


class Send(NamedTuple):
    """Sends the elements of `span` to `peer`."""

    peer: int
    span: Span


class Receive(NamedTuple):
    """Receives the elements of `span` from each peer, and adds them to or replaces those of this rank.

    If `add` is True, the received values and this rank's own values are added in a fixed order:
    that of `peers`, with the own values at position `own`. Otherwise there is one peer, whose
    values replace those of this rank. Sums of 16-bit values are computed in fp32 and rounded once.
    If `wide` is True, the sum stays in fp32 until a `Round` step.
    """

    peers: tuple[int, ...]
    span: Span
    add: bool = False
    own: int = 0
    wide: bool = False


class Round(NamedTuple):
    """Rounds sums that were kept in fp32 to the dtype of the messages."""

    span: Span


class Collective(NamedTuple):
    """Runs a collective of the backend among `members`; the first member is the root.

    `beside` is the number of such collectives that run concurrently and share the links of a node.
    """

    kind: CollectiveKind
    members: tuple[int, ...]
    span: Span
    beside: int = 1


class Pause(NamedTuple):
    """Marks the end of a round, after which other segments of the buffer run their rounds."""


PAUSE: Final = Pause()
Step = Send | Receive | Round | Collective | Pause
Steps = Iterator[Step]
Rounds = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Groups:
    """Divides all ranks into groups for hierarchical algorithms. A group is a node by default.

    `nested` is True if schedules use the backend's own collectives in sub-groups of ranks, as over NCCL.
    """

    groups: tuple[tuple[int, ...], ...]
    nested: bool = False

    @classmethod
    def of_nodes(cls, counts: Sequence[int], *, nested: bool = False) -> Groups:
        """Returns groups of ascending ranks, with `counts` ranks on each node."""
        ends = [sum(counts[: at + 1]) for at in range(len(counts))]
        nodes = zip(ends, counts, strict=True)
        return cls(tuple(tuple(range(end - n, end)) for end, n in nodes), nested)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, group by group.

        A ring in this order enters and leaves each node only once.
        """
        return tuple(rank for group in self.groups for rank in group)

    @cached_property
    def masters(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Sub-groups with one rank of each group; the ranks of column c sum chunk c of a buffer.

        There are as many columns as the largest group has ranks. A rank of a smaller group can be in
        several columns.
        """
        width = max(len(group) for group in self.groups)
        return tuple(
            tuple(group[column % len(group)] for group in self.groups) for column in range(width)
        )

    @cached_property
    def is_uniform(self) -> bool:
        return len({len(group) for group in self.groups}) == 1

    def row_of(self, rank: int) -> tuple[int, ...]:
        """Returns the group that `rank` belongs to."""
        return next(group for group in self.groups if rank in group)


class Segment(NamedTuple):
    """A part of the all-reduced buffer: `length` elements of `item_bytes` bytes each.

    `number` is the index of the segment in the buffer, or this index modulo the number of columns.
    """

    length: int
    item_bytes: int = 4
    number: int = 0


Schedule = Callable[[int, Groups, Segment], Steps]


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: its schedule, and how it divides a buffer into segments.

    Attributes:
        name: The name of the algorithm.
        schedule: The generator function that yields the steps of a rank.
        depth: Number of segments that are summed concurrently. A buffer that is too short for so
            many segments of `least_bytes` has fewer.
        least_bytes: The smallest size of a segment; a shorter buffer is one segment.
        most_bytes: The largest size of a segment; a longer buffer has more than `depth` segments.
        tuned: True if `paceline tune` tries the algorithm by default.
        cost: The cost formula, if `paceline.plan.cost` does not contain one for this algorithm.
    """

    name: str
    schedule: Schedule
    depth: int = 2
    least_bytes: int = MIB
    most_bytes: int = 8 * MIB
    tuned: bool = True
    cost: Cost | None = None

    def rounds(self, rank: int, groups: Groups, segment: Segment) -> Rounds:
        """Returns the steps of `rank`, round by round, without empty messages."""
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
    """Yields (segment, lane, round) in the order in which all ranks execute a buffer's segments.

    At most `depth` segments are in progress, each on its own lane. At most half of the lanes start a
    segment in the same pass, so that each link always has several messages to carry. The other lanes
    keep the links busy while new segments start.

    Args:
        counts: The number of rounds of each segment.
        depth: The number of lanes.
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
    """Divides a range of elements into `parts` ranges of nearly equal length, some possibly empty."""
    start, length = span[0], span[1] - span[0]
    return [
        (start + length * at // parts, start + length * (at + 1) // parts) for at in range(parts)
    ]


class Arrival(NamedTuple):
    """A `Receive` step, and the memory to which its messages are written.

    A message that is summed with local values is first written to the inbox, from element `inbox` on.
    A message that replaces a span is written to the segment. `batch` is set on the first of several
    consecutive receives: it contains the indices of all of them, which are posted together if messages
    are batched.
    """

    step: Receive
    inbox: int
    batch: tuple[int, ...]


class Departure(NamedTuple):
    """A `Send` step. `copy` is None, or the offset of a copy from which the span is sent.

    A copy is needed if the span changes while a slow peer may still be receiving the span. `fill` is
    True if this operation makes the copy, and False if an earlier one has made the copy.
    """

    step: Send
    copy: int | None
    fill: bool


Op = Arrival | Departure | Round


class Program(NamedTuple):
    """The compiled rounds of one rank for one segment.

    Attributes:
        rounds: The operations of each round.
        arrivals: All receives, in order.
        inbox: Number of elements of the inbox memory, for messages that are added.
        copies: Number of elements of the memory for copies of sent spans.
        wide: The smallest span that contains all sums that are kept in fp32.
        collectives: The collectives, if the schedule consists of collectives instead of messages.
    """

    rounds: tuple[tuple[Op, ...], ...]
    arrivals: tuple[Arrival, ...]
    inbox: int
    copies: int
    wide: Span
    collectives: tuple[Collective, ...]


def compile_rounds(rounds: Rounds) -> Program:
    """Compiles the rounds of one rank for one segment into a `Program`."""
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
    """Marks the consecutive receives in `run` as one batch that is posted together; clears `run`.

    If these receives were posted separately, three ranks could wait for one another in a cycle.
    """
    if run:
        arrivals[run[0]] = first = arrivals[run[0]]._replace(batch=tuple(run))
        ops[len(ops) - len(run)] = first
        run.clear()


def _changes_later(steps: Sequence[Step]) -> list[bool]:
    """Returns, for each step, True if it is a `Send` of values to which a later step adds."""
    changes: list[bool] = []
    added: list[Span] = []
    for step in reversed(steps):
        if isinstance(step, Receive) and step.add:
            added.append(step.span)
        changes.append(isinstance(step, Send) and any(_overlap(step.span, span) for span in added))
    return changes[::-1]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
