"""Scripts: all messages of an all-reduce, rank by rank, as the communication module sends them.

In: an algorithm, nodes, ranks a node, a size. Out: for every rank its messages in order. Segments, the
choice among ways to add up by size and the order of rounds are the communication module's own; `native`
is Gloo's ring, two segments a rank, each asked for only when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.core.errors import ConfigError, nearest
from paceline.plan.rank_rounds import (
    Lane,
    Message,
    Rounds,
    Script,
    flood,
    from_owners,
    halving,
    parts,
    ring,
    to_owners,
)
from paceline.plan.rank_tree import binomial, branch, down, flat, up

KIB, MIB = 1024, 1024 * 1024
# Segments under way at most, and their least and largest bytes.
_SEGMENTS = {
    "ring": (2, MIB, 8 * MIB), "halving_doubling": (2, MIB, 8 * MIB), "tree": (2, MIB, 4 * MIB),
    "hierarchical": (8, 512 * KIB, 2 * MIB), "torus2d": (2, 2 * MIB, 8 * MIB),
    "central": (2, 4 * MIB, 16 * MIB),
}  # fmt: skip
SCRIPTED = ("native", *_SEGMENTS)
_WIDTH = 4
_FEW, _FLOOD_BYTES, _EXCHANGE_BYTES, _HALVING_BYTES = 8, 24 * KIB, 64 * KIB, MIB
_NATIVE_SEGMENT = MIB


def scripts(
    algorithm: str, nodes: int, ranks_per_node: int, size_bytes: int
) -> list[list[Message]]:
    """For a float32 buffer."""
    if algorithm not in SCRIPTED:
        raise ConfigError("algorithm", algorithm, "unknown", nearest(algorithm, SCRIPTED))
    groups = [tuple(range(n * ranks_per_node, (n + 1) * ranks_per_node)) for n in range(nodes)]
    ranks, length = nodes * ranks_per_node, max(1, size_bytes // _WIDTH)
    if ranks == 1:
        return [[]]
    if algorithm == "native":
        return [_native(rank, ranks, length) for rank in range(ranks)]
    cuts = _cuts(algorithm, length)
    found = []
    for rank in range(ranks):
        script = Script()

        def start(at: int, number: int, out: Script = script, me: int = rank) -> Rounds:
            return _rounds(algorithm, out, at, number, cuts[at], groups, me)

        _run(len(cuts), min(_SEGMENTS[algorithm][0], len(cuts)), start)
        found.append(script.messages)
    return found


def _cuts(algorithm: str, length: int) -> list[int]:
    depth, least, largest = _SEGMENTS[algorithm]
    size = length * _WIDTH
    most = min(depth, max(1, size // least))
    return parts(length, max(most, -(-size // largest)))


def _run(count: int, depth: int, start: Callable[[int, int], Rounds]) -> None:
    """Half of the segments that fit begin in the same pass."""
    free, admitted = deque(range(depth)), 0
    active: deque[tuple[int, Rounds]] = deque()
    while admitted < count or active:
        for _ in range(min(max(1, depth // 2), count - admitted, len(free))):
            number = free.popleft()
            active.append((number, start(admitted, number)))
            admitted += 1
        for _ in range(len(active)):
            number, rounds = active.popleft()
            if next(rounds, StopIteration) is StopIteration:
                free.append(number)
            else:
                active.append((number, rounds))


def _rounds(
    algorithm: str, script: Script, at: int, number: int, length: int,
    groups: Sequence[tuple[int, ...]], rank: int,
) -> Rounds:  # fmt: skip
    order, lane = [r for group in groups for r in group], (number, 0)
    row = next(group for group in groups if rank in group)
    if algorithm == "ring":
        yield from ring(script, lane, length, order, rank)
    elif algorithm == "halving_doubling":
        yield from halving(script, lane, length, order, rank)
    elif algorithm == "tree":
        place = branch(order, rank, binomial)
        yield from up(script, lane, length, place)
        yield from down(script, lane, length, place)
    elif algorithm == "central":
        servers = [group[0] for group in groups]
        chunks = parts(length, len(servers))
        yield from to_owners(script, lane, chunks, order, servers, rank)
        yield from from_owners(script, lane, chunks, order, servers, rank)
    elif algorithm == "torus2d":
        chunks, column = parts(length, len(row)), row.index(rank)
        kind = _kind(len(groups), length * _WIDTH // len(row))
        yield from to_owners(script, lane, chunks, row, row, rank)
        members = [group[column] for group in groups]
        beside = (number, column + 1)
        for _ in _among(kind, script, beside, chunks[column], members, rank):
            yield
        yield
        yield from from_owners(script, lane, chunks, row, row, rank)
    else:
        turn = at % len(row)
        turned = (*row[turn:], *row[:turn])
        place = branch(turned, rank, flat if len(row) <= _FEW else binomial)
        members = [group[turn] for group in groups]
        kind = _kind(len(groups), length * _WIDTH)
        count = _count(kind, len(members))
        among = iter((None,) * count)
        if rank in members:
            among = _among(kind, script, lane, length, members, rank)
        yield from _unpaused(up(script, lane, length, place), place.levels + 1)
        yield from _unpaused(among, count)
        yield from down(script, lane, length, place)


def _unpaused(rounds: Rounds, count: int) -> Rounds:
    """A phase ends in the round in which the next begins."""
    for _ in range(count - 1):
        next(rounds)
        yield
    for _ in rounds:
        pass


def _kind(members: int, size_bytes: int) -> str:
    if members > _FEW:
        return "halving_doubling" if size_bytes <= _HALVING_BYTES else "ring"
    if size_bytes * (members - 1) <= _FLOOD_BYTES:
        return "flood"
    return "exchange" if size_bytes <= _EXCHANGE_BYTES else "ring"


def _count(kind: str, members: int) -> int:
    if members == 1:
        return 0
    if kind == "ring":
        return 2 * members - 1
    if kind == "halving_doubling":
        levels = members.bit_length() - 1
        return 2 * levels + (2 if members > 1 << levels else 0)
    return 2 if kind == "flood" else 4


def _among(
    kind: str, script: Script, lane: Lane, length: int, members: Sequence[int], rank: int
) -> Rounds:
    if len(members) == 1:
        return iter(())
    if kind == "exchange":
        return _exchange(script, lane, parts(length, len(members)), members, rank)
    ways = {"flood": flood, "ring": ring, "halving_doubling": halving}
    return ways[kind](script, lane, length, members, rank)


def _exchange(
    script: Script, lane: Lane, chunks: Sequence[int], members: Sequence[int], rank: int
) -> Rounds:
    yield from to_owners(script, lane, chunks, members, members, rank)
    yield from from_owners(script, lane, chunks, members, members, rank)


def _native(rank: int, ranks: int, length: int) -> list[Message]:
    """Both ways around: each segment leaves once the one two before it has come."""
    each = max(2, -(-length * _WIDTH // (ranks * _NATIVE_SEGMENT)))
    segments = parts(length, ranks * each)
    script, before, after = Script(), (rank - 1) % ranks, (rank + 1) % ranks
    for first in (rank, rank + 1):
        sent = [segments[((first - 1 - i // each) % ranks) * each + i % each]
                for i in range((ranks - 1) * each)]  # fmt: skip
        came = [segments[((first - 2 - i // each) % ranks) * each + i % each]
                for i in range((ranks - 1) * each)]  # fmt: skip
        for i in range(len(sent) + 2):
            if i >= 2:
                script.take(before, came[i - 2], (0, 0))
            if i < len(sent):
                script.send(after, sent[i], (0, 0))
    return script.messages
