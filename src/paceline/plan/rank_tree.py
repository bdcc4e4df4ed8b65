"""Trees of ranks: what one rank sends up and down (see `rank_rounds`).

In: members, the first being the root, and the kind of tree. Out: this rank's `Branch`, and its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.plan.rank_rounds import Lane, Rounds, Script


class Branch(NamedTuple):
    """A rank's place in a tree: `height` rounds before it can send up, `depth` before it is told."""

    parent: int | None
    children: tuple[int, ...]
    height: int
    depth: int
    levels: int


def binomial(at: int) -> int:
    return at & (at - 1)


def flat(at: int) -> int:
    return 0


def branch(members: Sequence[int], rank: int, parent_of: Callable[[int], int]) -> Branch:
    size = len(members)
    children: list[list[int]] = [[] for _ in members]
    height, depth = [0] * size, [0] * size
    for at in range(1, size):
        depth[at] = depth[parent_of(at)] + 1
    for at in range(size - 1, 0, -1):
        children[parent_of(at)].append(at)
        height[parent_of(at)] = max(height[parent_of(at)], height[at] + 1)
    at = members.index(rank)
    soonest = sorted(children[at], key=lambda child: (height[child], child))
    return Branch(
        None if at == 0 else members[parent_of(at)],
        tuple(members[child] for child in soonest), height[at], depth[at], max(depth),
    )  # fmt: skip


def up(script: Script, lane: Lane, length: int, place: Branch) -> Rounds:
    for number in range(place.levels + 1):
        if number == place.height:
            for child in place.children:
                script.take(child, length, lane)
            if place.parent is not None:
                script.send(place.parent, length, lane)
        yield


def down(script: Script, lane: Lane, length: int, place: Branch) -> Rounds:
    for number in range(place.levels + 1):
        if number == place.depth:
            if place.parent is not None:
                script.take(place.parent, length, lane)
            for child in reversed(place.children):
                script.send(child, length, lane)
        yield
