"""`GroupLayout`: which ranks share a group, and who stands in the same place of every group.

In: each rank's node and place on it, and k, where groups of k are asked for. Out: rows (the groups),
columns (one chunk of a buffer each, one owner in every group) and masters. Groups may differ in size:
in a small one a rank owns several columns. Pure Python; every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.core.errors import CommError, ConfigError


@dataclass(frozen=True)
class Place:
    """What one rank says of itself."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class GroupLayout:
    """Groups of ranks, neighbours first: a ring in this order crosses each node's link once."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def from_places(cls, places: Sequence[Place], k: int | None = None) -> GroupLayout:
        """One group for each node, or groups of k ranks; the last of a node, or of all, may be smaller.

        A k that fits into a node cuts each node by itself, so that no group spans two nodes; a larger
        k gathers neighbouring nodes.
        """
        nodes = _nodes(places)
        if k is None:
            return cls(tuple(nodes))
        if k < 1:
            raise ConfigError("comm.group_size", k, "must be 1 or more", "leave it out for nodes")
        whole = [tuple(rank for node in nodes for rank in node)]
        pieces = nodes if k <= max(len(node) for node in nodes) else whole
        # Ascending, as torch.distributed numbers the members of a group.
        return cls(
            tuple(
                tuple(sorted(piece[at : at + k]))
                for piece in pieces
                for at in range(0, len(piece), k)
            )
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, group by group."""
        return tuple(rank for group in self.groups for rank in group)

    @cached_property
    def masters(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """As many as the largest group has ranks; column c holds each group's owner of chunk c."""
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


def _nodes(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The ranks of each node, in ascending order; fails where the ranks contradict."""
    remedy = "start all ranks with one launcher; check its variables for rank, node and local rank"
    world = len(places)
    if sorted(p.rank for p in places) != list(range(world)):
        raise CommError(f"the ranks are not 0 to {world - 1}, once each", remedy)
    nodes: dict[int, dict[int, Place]] = {}
    for place in sorted(places, key=lambda p: p.rank):
        if place.world_size != world:
            raise CommError(
                f"rank {place.rank} counts {place.world_size} ranks, but there are {world}", remedy
            )
        node = nodes.setdefault(place.node, {})
        if place.local_rank in node:
            raise CommError(
                f"ranks {node[place.local_rank].rank} and {place.rank} are both local rank "
                f"{place.local_rank} of node {place.node}",
                remedy,
            )
        node[place.local_rank] = place
    for number, node in nodes.items():
        for place in node.values():
            if place.local_world_size != len(node):
                raise CommError(
                    f"rank {place.rank} counts {place.local_world_size} ranks on node {number}, "
                    f"but {len(node)} are there",
                    remedy,
                )
    return [
        tuple(sorted(place.rank for place in node.values())) for _, node in sorted(nodes.items())
    ]
