"""Clusters for tests: ranks of one pool on emulated nodes, `nodes` ranks on each.

One pool of eight processes serves all sizes: importing torch costs far more than forming a new group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.process_groups import ProcessGroups
from paceline.core.topology import Topology
from ranks import run_ranks

POOL = 8


def topology(rank: int, nodes: Sequence[int]) -> Topology:
    first = 0
    for node, count in enumerate(nodes):
        if rank < first + count:
            return Topology(
                rank, sum(nodes), rank - first, count, node, launcher="test"
            )  # fmt: skip
        first += count
    raise AssertionError(rank)


def run_cluster(nodes: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `function(rank, nodes, *args)` on each rank of the cluster, and returns the results."""
    size = sum(nodes)
    return run_ranks(max(POOL, size), _enter, tuple(nodes), function, args)[:size]


def _enter(rank: int, nodes: tuple[int, ...], function: Callable[..., Any], args: Any) -> Any:
    if rank >= sum(nodes):
        return None
    dist.init_process_group(
        "gloo", rank=rank, world_size=sum(nodes), timeout=timedelta(seconds=100)
    )
    try:
        return function(rank, nodes, *args)
    finally:
        dist.destroy_process_group()


@contextmanager
def made_groups(
    rank: int, nodes: Sequence[int], k: int | None = None, **options: Any
) -> Iterator[ProcessGroups]:
    groups = ProcessGroups(topology(rank, nodes), k, timeout_s=100, **options)
    try:
        yield groups
    finally:
        groups.close()
