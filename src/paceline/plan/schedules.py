"""All-reduce algorithms as schedules: what one rank sends, receives and adds.

A schedule yields the steps of one rank for one segment (part) of a buffer; a span is a range of elements.
`paceline.comm` executes it over Gloo or NCCL, and a formula in `paceline.plan.cost` predicts its time.
Every schedule obeys these rules, which tests check:

- Messages between two ranks keep their order: the n-th message that one rank sends to the other is the
  n-th message that the other rank receives, with the same span.
- All ranks have the same number of rounds, and no round waits for a message of a later round. So all
  ranks can alternate between the rounds of several segments without a deadlock.
- A rank receives a replacement of a span only after this rank has sent its data of that span, on which
  the replacement depends. Otherwise a receive that is posted in advance could overwrite the data.

The decorator `register` makes a function an algorithm that all commands know. `tree` is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import ConfigError, nearest
from paceline.plan.steps import (
    MIB,
    PAUSE,
    Algorithm,
    Collective,
    Groups,
    Pause,
    Receive,
    Round,
    Schedule,
    Segment,
    Send,
    Span,
    Step,
    Steps,
    cut,
)

if TYPE_CHECKING:
    from paceline.plan.cost import Cost

KIB = 1024
# Length of a segment in which no algorithm has empty messages.
_LONG = 1 << 20
NATIVE = "native"
REGISTRY: dict[str, Algorithm] = {}


def register(
    *,
    depth: int = 2,
    least_bytes: int = MIB,
    most_bytes: int = 8 * MIB,
    tuned: bool = True,
    cost: Cost | None = None,
) -> Callable[[Schedule], Schedule]:
    """Returns a decorator that adds a schedule to the algorithms, under the name of its function.

    Args:
        depth: Number of segments of a buffer that are summed concurrently.
        least_bytes: The smallest size of a segment.
        most_bytes: The largest size of a segment.
        tuned: True if `paceline tune` tries the algorithm by default.
        cost: Function that predicts the seconds for each number of bytes on a cluster. Without it and
            without measurements the planner does not consider the algorithm.
    """

    def add(schedule: Schedule) -> Schedule:
        name = schedule.__name__
        REGISTRY[name] = Algorithm(name, schedule, depth, least_bytes, most_bytes, tuned, cost)
        return schedule

    return add


def algorithm_names() -> tuple[str, ...]:
    """Returns the names of all algorithms, including `native`, the backend's own all-reduce."""
    return (NATIVE, *REGISTRY)


def tuned_names() -> tuple[str, ...]:
    """Returns the names of the algorithms that `paceline tune` tries by default."""
    return (NATIVE, *(name for name, algorithm in REGISTRY.items() if algorithm.tuned))


def check_name(name: object, field: str = "comm.algorithm") -> None:
    names = algorithm_names()
    if name not in names:
        raise ConfigError(field, name, "unknown algorithm", nearest(str(name), names))


def algorithm(name: str) -> Algorithm:
    if name == NATIVE:
        raise ConfigError("algorithm", name, "has no schedule, because the backend executes it")
    check_name(name, "algorithm")
    return REGISTRY[name]


def parts_used(algorithms: Collection[str], groups: Groups) -> frozenset[str]:
    """Returns which process sub-groups `algorithms` need for the backend's collectives.

    Kinds are `rows`, `masters` and `columns`. `native` and the all-reduces of wire formats need none.
    """
    parts: set[str] = set()
    for name in set(algorithms) & set(REGISTRY):
        for rank in groups.groups[0]:
            for steps in algorithm(name).rounds(rank, groups, Segment(_LONG)):
                parts |= {_part(s, rank, groups) for s in steps if isinstance(s, Collective)}
    return frozenset(parts)


def _part(step: Collective, rank: int, groups: Groups) -> str:
    if step.members == groups.row_of(rank):
        return "rows"
    return "masters" if step.members == groups.masters else "columns"


# The algorithms.


@register()
def ring(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Ring all-reduce over all p ranks: 2(p−1) messages for each rank, each with 1/p of the segment."""
    return _ring(rank, groups.order, (0, segment.length))


@register(depth=8, least_bytes=512 * KIB, most_bytes=2 * MIB)
def hierarchical(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Reduce to a master in each group, sum among the masters, broadcast in each group.

    This is the algorithm of the paper and of Goyal et al. The master of a group changes from segment to
    segment. So the work is spread over processes, and the links between nodes stay busy while groups add
    and broadcast. Over NCCL the master is always the first rank of the group.
    """
    row, span = groups.row_of(rank), (0, segment.length)
    if groups.nested:
        return _nested_hierarchical(rank, row, groups.masters, span)
    turn = segment.number % len(groups.columns)
    masters, at = groups.columns[turn], turn % len(row)
    place = _row_tree((*row[at:], *row[:at]), rank)
    # The same number of rounds in every group, whatever its size.
    levels = max(_row_tree(group, group[0]).levels for group in groups.groups)
    place = place._replace(levels=levels)
    size = segment.length * segment.item_bytes
    count = sum(isinstance(s, Pause) for s in _sum_among(masters[0], masters, span, size))
    among: Steps = iter((PAUSE,) * count)
    if rank in masters:
        among = _sum_among(rank, masters, span, size)
    return _chained(
        _joined(_up(place, span), levels + 1), _joined(among, count), _down(place, span)
    )


@register(least_bytes=2 * MIB)
def torus2d(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows (Horovod and Sony).

    A row is a group. Each column contains one rank of each group and sums its own chunk of the segment.
    If all groups have the same size, all ranks have the same work.
    """
    row, columns = groups.row_of(rank), groups.columns
    if groups.nested and groups.is_uniform:
        return _nested_torus2d(rank, row, columns, segment.length)
    owners = tuple(row[number % len(row)] for number in range(len(columns)))
    chunks = cut((0, segment.length), len(columns))
    # The mean size of all chunks, so that all columns have the same number of rounds.
    size = segment.length * segment.item_bytes // len(columns)
    owned = [number for number, owner in enumerate(owners) if owner == rank]
    sums = [_sum_among(rank, columns[number], chunks[number], size) for number in owned]
    return _chained(
        _to_owners(rank, row, owners, chunks),
        _side_by_side(sums),
        _from_owners(rank, row, owners, chunks),
    )


@register()
def halving_doubling(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Recursive halving and doubling (Rabenseifner), each in log2(p) rounds.

    For a power of two, this algorithm sends as few bytes as the ring in far fewer rounds. Neighbouring
    ranks exchange the largest messages, so that few bytes travel between nodes.
    """
    return _halving(rank, groups.order, (0, segment.length))


@register(most_bytes=4 * MIB)
def tree(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Reduce up a binomial tree of all ranks, then broadcast down; a message is a whole segment."""
    place, span = _tree(groups.order, rank, _binomial), (0, segment.length)
    return _chained(_up(place, span), _down(place, span))


@register(least_bytes=4 * MIB, most_bytes=16 * MIB, tuned=False)
def central(rank: int, groups: Groups, segment: Segment) -> Steps:
    """Synchronous parameter server, a historical baseline; one rank of each group serves a shard."""
    chunks = cut((0, segment.length), len(groups.masters))
    return _chained(
        _to_owners(rank, groups.order, groups.masters, chunks),
        _from_owners(rank, groups.order, groups.masters, chunks),
    )


# Parts of algorithms.


def _chained(*phases: Steps) -> Steps:
    for phase in phases:
        yield from phase


def _joined(steps: Steps, rounds: int) -> Steps:
    """Omits the pause after the last of `rounds` rounds, so that the next steps join this round."""
    for step in steps:
        if isinstance(step, Pause):
            rounds -= 1
            if rounds <= 0:
                continue
        yield step


def _side_by_side(parts: Sequence[Steps]) -> Steps:
    """Combines schedules with equal numbers of rounds into one that runs them concurrently.

    The receives of a round come first: without tags, as over NCCL, they are posted in one batch.
    """
    live = list(parts)
    while live:
        steps: list[Step] = []
        still = []
        for part in live:
            for step in part:
                if isinstance(step, Pause):
                    still.append(part)
                    break
                steps.append(step)
        yield from sorted(steps, key=lambda step: not isinstance(step, Receive))
        yield PAUSE
        live = still


def _ring(rank: int, members: Sequence[int], span: Span) -> Steps:
    """Reduce-scatter and all-gather around a ring (Baidu).

    A partial sum is rounded at every hop, because it is sent in the number format of the buffer. The
    rank that completes a sum sends the same bits that it keeps.
    """
    size, at = len(members), members.index(rank)
    after, before = members[(at + 1) % size], members[at - 1]
    chunks = cut(span, size)
    yield Send(after, chunks[at])
    yield PAUSE
    for number in range(size - 1):
        chunk = chunks[(at - number - 1) % size]
        yield Receive((before,), chunk, add=True)
        # In the last iteration the sum is complete, and this message starts the all-gather.
        yield Send(after, chunk)
        yield PAUSE
    for number in range(size - 1):
        chunk = chunks[(at - number) % size]
        yield Receive((before,), chunk)
        if number < size - 2:
            yield Send(after, chunk)
        yield PAUSE


def _flood(rank: int, members: Sequence[int], span: Span) -> Steps:
    """Sends the span to all members, which add in the same order, so their sums are bit-identical."""
    at = members.index(rank)
    others = tuple(member for member in members if member != rank)
    for other in (*others[at:], *others[:at]):
        yield Send(other, span)
    yield PAUSE
    yield Receive(others, span, add=True, own=at)
    yield PAUSE


def _to_owners(
    rank: int, members: Sequence[int], owners: Sequence[int], chunks: Sequence[Span]
) -> Steps:
    """Reduce-scatter: sends each chunk of the segment to one member, which adds all members' chunks."""
    others = _others(rank, members)
    for other in others:
        for chunk, owner in zip(chunks, owners, strict=True):
            if owner == other:
                yield Send(other, chunk)
    yield PAUSE
    for chunk, owner in zip(chunks, owners, strict=True):
        if owner == rank and others:
            # In reverse order, because the nearest predecessor sends to this rank first.
            yield Receive(others[::-1], chunk, add=True)
    yield PAUSE


def _from_owners(
    rank: int, members: Sequence[int], owners: Sequence[int], chunks: Sequence[Span]
) -> Steps:
    """All-gather: sends each summed chunk of the segment from the member that has it to all others."""
    others = _others(rank, members)
    for other in others:
        for chunk, owner in zip(chunks, owners, strict=True):
            if owner == rank:
                yield Send(other, chunk)
    yield PAUSE
    for other in others[::-1]:
        for chunk, owner in zip(chunks, owners, strict=True):
            if owner == other:
                yield Receive((owner,), chunk)
    yield PAUSE


def _others(rank: int, members: Sequence[int]) -> tuple[int, ...]:
    """Returns the other members in cyclic order, so that senders start with different receivers."""
    at = members.index(rank)
    return (*members[at + 1 :], *members[:at])


def _halving(rank: int, members: Sequence[int], span: Span) -> Steps:
    """Recursive halving (a reduce-scatter), then recursive doubling (an all-gather).

    If the number of members is not a power of two, some of the first members form pairs: the even
    member of a pair sends its whole span to the odd member, which returns the result. Sums stay in fp32
    as long as a rank keeps them. A rank rounds each part before sending it, and at the end of the
    halving its own part.
    """
    core = 1 << (len(members).bit_length() - 1)
    extra, levels, at = len(members) - core, core.bit_length() - 1, members.index(rank)
    partner = members[at ^ 1] if at < 2 * extra else None
    if partner is not None and at % 2 == 0:
        yield Send(partner, span)
        for _ in range(2 * levels + 2):
            yield PAUSE
        yield Receive((partner,), span)
        return
    if extra:
        yield PAUSE
    if partner is not None:
        yield Receive((partner,), span, add=True, wide=True)
    place = at // 2 if at < 2 * extra else at - extra
    halves: list[tuple[int, Span, Span]] = []
    low, high = span
    for level in range(levels):
        other, middle = place ^ (1 << level), (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        kept, given = (upper, lower) if place >> level & 1 else (lower, upper)
        halves.append((members[2 * other + 1 if other < extra else other + extra], kept, given))
        low, high = kept
    for peer, kept, given in halves:
        yield Round(given)
        yield Send(peer, given)
        yield PAUSE
        yield Receive((peer,), kept, add=True, wide=True)
    yield Round((low, high))
    for peer, kept, given in reversed(halves):
        yield Send(peer, kept)
        yield PAUSE
        yield Receive((peer,), given)
    if extra:
        if partner is not None:
            yield Send(partner, span)
        yield PAUSE


# Measured over Gloo with four masters behind links of 200 Mbit/s. A flood takes one exchange but sends
# the whole span to every member, and many senders slow each other on one link.
FEW_MEMBERS = 8
FLOOD_BYTES, EXCHANGE_BYTES, HALVING_BYTES = 24 * KIB, 64 * KIB, MIB


def _sum_among(rank: int, members: Sequence[int], span: Span, size_bytes: int) -> Steps:
    """Sums `span` over `members`, by an algorithm that depends on their number and on `size_bytes`."""
    count = len(members)
    if count == 1:
        return iter(())
    if count > FEW_MEMBERS:
        return (_halving if size_bytes <= HALVING_BYTES else _ring)(rank, members, span)
    if size_bytes * (count - 1) <= FLOOD_BYTES:
        return _flood(rank, members, span)
    if size_bytes > EXCHANGE_BYTES:
        return _ring(rank, members, span)
    chunks = cut(span, count)
    return _chained(
        _to_owners(rank, members, members, chunks), _from_owners(rank, members, members, chunks)
    )


class _Place(NamedTuple):
    """The position of a rank in the tree of a reduce or broadcast.

    Attributes:
        parent: The parent's rank, or None for the root.
        children: The children's ranks, in the order in which they are ready to send to this rank.
        height: Number of rounds before the rank can send its sum to the parent.
        depth: Number of rounds before the result of the broadcast reaches the rank.
        levels: The depth of the tree. All ranks run `levels` + 1 rounds in each direction.
    """

    parent: int | None
    children: tuple[int, ...]
    height: int
    depth: int
    levels: int


def _binomial(at: int) -> int:
    """Returns the parent of member `at` in a binomial tree, which takes ⌈log2 n⌉ rounds."""
    return at & (at - 1)


def _flat(at: int) -> int:
    """Returns 0, the root, which is the parent of all members of a flat tree."""
    return 0


def _row_tree(row: Sequence[int], rank: int) -> _Place:
    return _tree(row, rank, _flat if len(row) <= FEW_MEMBERS else _binomial)


def _tree(members: Sequence[int], rank: int, parent_of: Callable[[int], int]) -> _Place:
    size = len(members)
    children: list[list[int]] = [[] for _ in members]
    height, depth = [0] * size, [0] * size
    for at in range(1, size):
        depth[at] = depth[parent_of(at)] + 1
    for at in range(size - 1, 0, -1):
        above = parent_of(at)
        children[above].append(at)
        height[above] = max(height[above], height[at] + 1)
    at = members.index(rank)
    soonest = sorted(children[at], key=lambda child: (height[child], child))
    return _Place(
        None if at == 0 else members[parent_of(at)],
        tuple(members[child] for child in soonest),
        height[at],
        depth[at],
        max(depth),
    )


def _up(place: _Place, span: Span) -> Steps:
    for number in range(place.levels + 1):
        if number == place.height:
            if place.children:
                yield Receive(place.children, span, add=True)
            if place.parent is not None:
                yield Send(place.parent, span)
        yield PAUSE


def _down(place: _Place, span: Span) -> Steps:
    for number in range(place.levels + 1):
        if number == place.depth:
            if place.parent is not None:
                yield Receive((place.parent,), span)
            # Deepest branches first: they need the most time.
            for child in reversed(place.children):
                yield Send(child, span)
        yield PAUSE


def _nested_hierarchical(
    rank: int, row: tuple[int, ...], masters: tuple[int, ...], span: Span
) -> Steps:
    if len(row) > 1:
        yield Collective("reduce", row, span)
    if rank in masters and len(masters) > 1:
        yield Collective("all_reduce", masters, span)
    if len(row) > 1:
        yield Collective("broadcast", row, span)


def _nested_torus2d(
    rank: int, row: tuple[int, ...], columns: Sequence[tuple[int, ...]], length: int
) -> Steps:
    """Runs `torus2d` with the backend's collectives; the last chunk may extend beyond the segment."""
    at, width = row.index(rank), len(row)
    each = -(-length // width)
    if width > 1:
        yield Collective("reduce_scatter", row, (0, each * width))
    if len(columns[at]) > 1:
        yield Collective("all_reduce", columns[at], (each * at, each * (at + 1)), beside=width)
    if width > 1:
        yield Collective("all_gather", row, (0, each * width))
