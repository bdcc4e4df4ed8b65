"""With whom a rank exchanges messages: what NCCL's connections are opened for beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline.comm.algorithms.central import Central
from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.halving_doubling import HalvingDoubling
from paceline.comm.algorithms.hierarchical import Hierarchical
from paceline.comm.algorithms.ring import Ring
from paceline.comm.algorithms.torus2d import Torus2d
from paceline.comm.algorithms.tree import Tree
from paceline.comm.group_layout import GroupLayout

KINDS: list[type[Explicit]] = [Ring, Hierarchical, Torus2d, HalvingDoubling, Tree, Central]
LAYOUTS = [[2], [1, 1], [4], [2, 2], [3, 1], [3, 2], [1] * 12, [4] * 4, [5, 4, 3]]


@dataclass
class Groups:
    """As much of `ProcessGroups` as an algorithm reads before it sends."""

    rank: int
    layout: GroupLayout
    backend: str = "nccl"
    world: Any = None

    @property
    def world_size(self) -> int:
        return len(self.layout.order)


def layout(nodes: list[int]) -> GroupLayout:
    ranks = iter(range(sum(nodes)))
    return GroupLayout(tuple(tuple(next(ranks) for _ in range(count)) for count in nodes))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_peers_are_mutual_and_join_all_ranks(kind: type[Explicit], nodes: list[int]) -> None:
    shape = layout(nodes)
    size = sum(nodes)
    found = [kind(Groups(rank, shape)).peers() for rank in range(size)]  # type: ignore[arg-type]
    for rank, peers in enumerate(found):
        assert rank not in peers
        assert all(rank in found[peer] for peer in peers)
    reached, new = {0}, {0}
    while new:
        new = {peer for rank in new for peer in found[rank]} - reached
        reached |= new
    assert reached == set(range(size))


def test_the_peers_of_a_tree_are_its_parent_and_children() -> None:
    shape = layout([4])
    assert Tree(Groups(0, shape)).peers() == {1, 2}  # type: ignore[arg-type]
    assert Tree(Groups(3, shape)).peers() == {2}  # type: ignore[arg-type]
