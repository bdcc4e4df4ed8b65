"""Computes in which order an all-reduce schedule adds the ranks' values, and where it rounds.

A schedule (`paceline.plan.schedules`) is simulated once with symbols in place of values. The result
is, for each stretch of the buffer (a range of elements), a tree of additions over the ranks.
`compile_reduction` turns these trees into a `Reduction`: instructions for one process that gets the
ranks' buffers one after the other and frees each as soon as the trees allow.
`paceline.rehearsal.exchange` executes the instructions on tensors.

A rank's buffer is called a row. A plane is memory for intermediate values of some stretches: `HELD`
for rows that wait and `SUM` for partial sums, both in the buffer's format, and `WIDE` for sums in
fp32. Neighbouring stretches with equal instructions share one instruction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.plan.schedules import NATIVE, algorithm
from paceline.plan.steps import (
    Algorithm,
    Collective,
    Groups,
    Pause,
    Receive,
    Round,
    Segment,
    Send,
    Span,
)

# Kinds of nodes: a sum in the buffer's format, a sum that stays in fp32, and the rounding of an
# fp32 sum.
_ADD, _ADD_WIDE, _ROUND = range(3)
HELD, SUM, WIDE, ROW = "held", "sum", "wide", "row"
# The kind and number of a plane. `_ROW` means the row of the rank that is being added.
Plane = tuple[str, int]
_ROW: Plane = (ROW, 0)


class Instruction(NamedTuple):
    """One addition or copy, on the elements `start` to `stop` of a gradient buffer.

    The instruction computes `into` ← `into` + `term`; if `first` is given, `into` ← `first` +
    `term`; if `adds` is False, `into` ← `term`.
    """

    into: Plane
    term: Plane
    first: Plane | None
    adds: bool
    start: int
    stop: int


class Reduction(NamedTuple):
    """The instructions that sum a buffer over all ranks.

    Attributes:
        arrivals: For each rank, in the order in which ranks are added, the instructions that add
            its buffer.
        result: The planes that hold the final sum, each with the first and last element
            (exclusive).
        planes: The range of elements for which each plane (memory for partial sums) is needed.
    """

    arrivals: tuple[tuple[Instruction, ...], ...]
    result: tuple[tuple[Plane, int, int], ...]
    planes: dict[Plane, Span]


def compile_reduction(
    name: str, groups: Groups, length: int, item_bytes: int, *, order: Sequence[int],
    segmented: bool = True,
) -> Reduction:  # fmt: skip
    """Compiles the instructions that sum a buffer exactly as an algorithm on the cluster does.

    Args:
        name: The algorithm. `native` means Gloo's ring; the order of NCCL is not documented.
        groups: The groups of ranks.
        length: Number of elements of the buffer.
        item_bytes: Bytes of an element. With 2 bytes, values are added in fp32 and rounded where
            the schedule rounds.
        order: The order in which ranks are added. It affects the memory, but not the sums.
        segmented: True to divide the buffer into segments, as Paceline does over Gloo. Over NCCL, a
            buffer is one segment.
    """
    ranks = len(groups.order)
    parts: list[tuple[int, _Program]] = []
    if name == NATIVE:
        parts.append((0, _Program(_gloo_ring(ranks, length, item_bytes), order)))
    else:
        chosen, width = algorithm(name), len(groups.columns)
        cuts = chosen.segments(length, item_bytes) if segmented else [(0, length)]
        made: dict[Segment, _Program] = {}
        for number, (start, stop) in enumerate(cuts):
            turn = number % width if len(cuts) > 1 else 0
            segment = Segment(stop - start, item_bytes, turn)
            if segment not in made:
                made[segment] = _Program(_play(chosen, groups, segment), order)
            parts.append((start, made[segment]))
    every = len(parts)
    arrivals = tuple(
        tuple(
            instruction
            for number, (start, program) in enumerate(parts)
            for instruction in program.arrival(rank, start, number, every)
        )
        for rank in order
    )
    result: list[tuple[Plane, int, int]] = []
    planes: dict[Plane, Span] = {}
    for number, (start, program) in enumerate(parts):
        for plane, low, high in program.results():
            result.append((_renumbered(plane, number, every), start + low, start + high))
        for plane, (low, high) in program.hulls().items():
            planes[_renumbered(plane, number, every)] = (start + low, start + high)
    return Reduction(arrivals, tuple(result), planes)


def _renumbered(plane: Plane, segment: int, segments: int) -> Plane:
    """Returns the plane (memory for partial sums) with a number that is unique among all segments."""
    return plane if plane == _ROW else (plane[0], plane[1] * segments + segment)


class _Trees(NamedTuple):
    """The trees of additions of one segment, with a tree for each stretch between two `bounds`.

    Nodes are integers. A node below the number of ranks is a leaf, the buffer of that rank. `kind`,
    `left` and `right` describe the remaining nodes in their order. `roots` has the root of each
    stretch.
    """

    bounds: list[int]
    roots: list[int]
    kind: list[int]
    left: list[int]
    right: list[int]


# In Gloo's ring: the largest message in bytes, and the least number of messages for each rank.
_GLOO_MOST_BYTES, _GLOO_LEAST_MESSAGES = 1 << 20, 2


def _gloo_ring(ranks: int, length: int, item_bytes: int) -> _Trees:
    """Returns the order of additions in Gloo's ring all-reduce, which was found by tests.

    Gloo divides a buffer into equal chunks of whole messages, one chunk for each rank. Chunk c
    starts on rank c − 1 and is sent to ever lower ranks, each of which adds its own values and
    rounds.
    """
    size = length * item_bytes
    most = item_bytes * (_GLOO_MOST_BYTES // item_bytes)
    messages = -(-max(-(-size // most), _GLOO_LEAST_MESSAGES * ranks) // ranks)
    message_bytes = -(-size // (messages * ranks))
    chunk = messages * -(-message_bytes // item_bytes)
    bounds = [*range(0, length, max(1, chunk)), length]
    trees = _Trees(bounds, [], [], [], [])
    for number in range(len(bounds) - 1):
        total = (number - 1) % ranks
        for at in range(2, ranks + 1):
            trees.kind.append(_ADD)
            trees.left.append(total)
            trees.right.append((number - at) % ranks)
            total = ranks + len(trees.kind) - 1
        trees.roots.append(total)
    return trees


def _play(chosen: Algorithm, groups: Groups, segment: Segment) -> _Trees:
    """Simulates an all-reduce with symbols for the ranks' values, and returns the additions.

    Each rank runs until it waits for a message that has not been sent. The result does not depend
    on the order in which ranks are simulated.
    """
    ranks = groups.order
    steps = {rank: list(_steps(chosen, rank, groups, segment)) for rank in ranks}
    bounds = sorted({0, segment.length}.union(*(s.span for own in steps.values() for s in own)))
    place = {edge: at for at, edge in enumerate(bounds)}
    symbols = _Symbols(len(ranks), len(bounds) - 1, half=segment.item_bytes == 2)
    sent: dict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    at = dict.fromkeys(ranks, 0)
    waiting: set[tuple[int, int]] = set()
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        for number in range(at[rank], len(steps[rank])):
            step = steps[rank][number]
            low, high = place[step.span[0]], place[step.span[1]]
            if isinstance(step, Send):
                key = (rank, step.peer)
                sent[key].append(symbols.content[rank][low:high])
                if key in waiting:
                    waiting.remove(key)
                    ready.append(step.peer)
            elif isinstance(step, Receive):
                missing = [peer for peer in step.peers if not sent[peer, rank]]
                if missing:
                    waiting.add((missing[0], rank))
                    at[rank] = number
                    break
                arrivals = [sent[peer, rank].popleft() for peer in step.peers]
                symbols.receive(rank, low, high, step, arrivals)
            else:
                symbols.round(rank, low, high)
        else:
            at[rank] = len(steps[rank])
    assert all(at[rank] == len(steps[rank]) for rank in ranks), f"{chosen.name} waits in a circle"
    return _Trees(bounds, symbols.content[ranks[0]], symbols.kind, symbols.left, symbols.right)


def _steps(
    chosen: Algorithm, rank: int, groups: Groups, segment: Segment
) -> Iterator[Send | Receive | Round]:
    for step in chosen.schedule(rank, groups, segment):
        assert not isinstance(step, Collective), "a rehearsal has messages only"
        if not isinstance(step, Pause) and step.span[0] < step.span[1]:
            yield step


class _Symbols:
    """State of a simulated all-reduce: the tree node that each rank holds for each range of elements.

    For 16-bit elements, `_wide` contains the nodes of a rank's fp32 sums.
    """

    def __init__(self, ranks: int, stretches: int, *, half: bool) -> None:
        self.content = [[rank] * stretches for rank in range(ranks)]
        self._half = half
        self._wide: dict[int, list[int]] = {}
        self._ranks = ranks
        self.kind: list[int] = []
        self.left: list[int] = []
        self.right: list[int] = []

    def receive(
        self, rank: int, low: int, high: int, step: Receive, arrivals: list[list[int]]
    ) -> None:
        own = self.content[rank]
        if not step.add:
            own[low:high] = arrivals[0]
        elif step.wide and self._half:
            wide = self._wide.setdefault(rank, own.copy())
            for arrival in arrivals:
                wide[low:high] = self._nodes(_ADD_WIDE, wide[low:high], arrival)
        else:
            terms = [*arrivals[: step.own], own[low:high], *arrivals[step.own :]]
            # A sum of two 16-bit terms is rounded at once. More than two are added in fp32, and
            # only the final sum is rounded.
            at_once = len(terms) == 2 or not self._half
            total: Sequence[int] = terms[0]
            for term in terms[1:]:
                total = self._nodes(_ADD if at_once else _ADD_WIDE, total, term)
            own[low:high] = total if at_once else self._nodes(_ROUND, total, total)

    def round(self, rank: int, low: int, high: int) -> None:
        if not self._half or rank not in self._wide:
            return
        wide = self._wide[rank][low:high]
        # A rank's own values, to which nothing was added, already have the buffer's format.
        self.content[rank][low:high] = [
            node if node < self._ranks else self._nodes(_ROUND, [node], [node])[0] for node in wide
        ]

    def _nodes(self, kind: int, left: Sequence[int], right: Sequence[int]) -> range:
        first = self._ranks + len(self.kind)
        self.kind += [kind] * len(left)
        self.left += left
        self.right += right
        return range(first, first + len(left))


# The fields `into`, `term`, `first` and `adds` of an `Instruction`, which has a range in addition.
_Op = tuple[Plane, Plane, Plane | None, bool]


class _Program:
    """The instructions for one segment of the buffer: `steps[rank][stretch]` is a list.

    A plane is reused for another value as soon as the previous value is no longer needed.
    """

    def __init__(self, trees: _Trees, order: Sequence[int]) -> None:
        self.bounds = trees.bounds
        self.steps: list[list[list[_Op]]] = [[[] for _ in trees.roots] for _ in order]
        self._order = order
        self._roots: list[Plane] = []
        self._uses: dict[Plane, list[int]] = {}
        for stretch, root in enumerate(trees.roots):
            self._roots.append(self._compile(trees, stretch, root))

    def arrival(self, rank: int, start: int, segment: int, segments: int) -> Iterator[Instruction]:
        """Yields the instructions that add the buffer of `rank`; neighboring stretches share equal ones.

        Stretches are independent. So the first instruction of every stretch is yielded before the
        second instruction of any.

        Args:
            rank: The rank.
            start: The first element of the segment in the buffer.
            segment: The number of the segment.
            segments: The number of segments.
        """
        stretches = self.steps[rank]
        for at in range(max((len(ops) for ops in stretches), default=0)):
            before: _Op | None = None
            low = high = 0
            for number, ops in enumerate(stretches):
                op = ops[at] if at < len(ops) else None
                if op is not None and op == before and high == self.bounds[number]:
                    high = self.bounds[number + 1]
                    continue
                if before is not None:
                    yield _instruction(before, start + low, start + high, segment, segments)
                before, low, high = op, self.bounds[number], self.bounds[number + 1]
            if before is not None:
                yield _instruction(before, start + low, start + high, segment, segments)

    def results(self) -> Iterator[tuple[Plane, int, int]]:
        yield from zip(self._roots, self.bounds, self.bounds[1:], strict=False)

    def hulls(self) -> dict[Plane, Span]:
        return {
            plane: (self.bounds[min(used)], self.bounds[max(used) + 1])
            for plane, used in self._uses.items()
        }

    def _compile(self, trees: _Trees, stretch: int, root: int) -> Plane:
        ranks = len(self._order)
        parent = _parents(trees, ranks, root)
        where: dict[int, Plane] = {}
        live: dict[str, set[int]] = {HELD: set(), SUM: set(), WIDE: set()}

        def take(kind: str) -> Plane:
            # The number of planes in use is mostly equal in neighbouring stretches, which then have
            # equal instructions.
            number = len(live[HELD]) if kind == HELD else len(live[SUM]) + len(live[WIDE])
            while number in live[kind]:
                number += 1
            live[kind].add(number)
            plane = (kind, number)
            self._uses.setdefault(plane, []).append(stretch)
            return plane

        def give_back(plane: Plane) -> None:
            if plane != _ROW:
                live[plane[0]].remove(plane[1])

        for rank in self._order:
            ops = self.steps[rank][stretch]
            node, value = rank, _ROW
            while node != root:
                above = parent[node]
                kind = trees.kind[above - ranks]
                if kind == _ROUND:
                    give_back(value)
                    into = take(SUM)
                    ops.append((into, value, None, False))
                else:
                    left, right = trees.left[above - ranks], trees.right[above - ranks]
                    other = where.pop(right if node == left else left, None)
                    if other is None:
                        break
                    wanted = SUM if kind == _ADD else WIDE
                    # Addition is commutative, so the sum overwrites an operand in the right format.
                    same = next((p for p in (other, value) if p[0] == wanted), None)
                    if same is not None:
                        into = same
                        term = value if same == other else other
                        ops.append((into, term, None, True))
                        give_back(term)
                    else:
                        give_back(value)
                        give_back(other)
                        into = take(wanted)
                        ops.append((into, value, other, True))
                node, value = above, into
            if value == _ROW:
                value = take(HELD)
                ops.append((value, _ROW, None, False))
            where[node] = value
        return where[root]


def _parents(trees: _Trees, ranks: int, root: int) -> dict[int, int]:
    parent_of: dict[int, int] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node < ranks:
            continue
        for below in {trees.left[node - ranks], trees.right[node - ranks]}:
            assert below not in parent_of, "a schedule adds a rank's numbers once"
            parent_of[below] = node
            stack.append(below)
    return parent_of


def _instruction(op: _Op, start: int, stop: int, segment: int, segments: int) -> Instruction:
    into, term, first, adds = op
    return Instruction(
        _renumbered(into, segment, segments), _renumbered(term, segment, segments),
        None if first is None else _renumbered(first, segment, segments), adds, start, stop,
    )  # fmt: skip
