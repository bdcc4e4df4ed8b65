"""`TreeShape`: this rank's place in a tree of ranks with the first member as root.

In: the members, in order, and the kind of tree. Out: parent, children (those that are ready first come
first), and the rounds in which this rank acts on the way up and on the way down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """`height`: rounds before this rank can send up; `depth`: rounds before the result reaches it."""

    parent: int | None
    children: tuple[int, ...]
    height: int
    depth: int
    levels: int


def flat(members: Sequence[int], rank: int) -> TreeShape:
    """All members beneath the root: one round, in which the root has all the work."""
    return _shape(members, rank, lambda at: 0)


def chain(members: Sequence[int], rank: int) -> TreeShape:
    """Each beneath the one before: many rounds, equal work; for buffers in many segments."""
    return _shape(members, rank, lambda at: at - 1)


def binomial(members: Sequence[int], rank: int) -> TreeShape:
    """⌈log2 n⌉ rounds; neighbours meet first."""
    return _shape(members, rank, lambda at: at & (at - 1))


def _shape(members: Sequence[int], rank: int, parent_of: Callable[[int], int]) -> TreeShape:
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
    return TreeShape(
        parent=None if at == 0 else members[parent_of(at)],
        children=tuple(members[child] for child in soonest),
        height=height[at],
        depth=depth[at],
        levels=max(depth),
    )
