from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from comm.clusters import made_groups, run_cluster, topology
from paceline.comm.group import Group
from paceline.comm.process_groups import ProcessGroups, all_gather_json
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError
from paceline.core.topology import Topology
from ranks import run_ranks


def _sum(group: dist.ProcessGroup | None, rank: int) -> float:
    if group is None:
        return -1.0
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def _sums(rank: int, nodes: tuple[int, ...]) -> tuple[float, float, dict[int, float], float]:
    with made_groups(rank, nodes, subgroups=True) as groups:
        assert groups.has_parts
        assert groups.world is not dist.group.WORLD
        columns = {number: _sum(group, rank) for number, group in groups.columns.items()}
        found = (
            _sum(groups.world, rank),
            _sum(groups.row, rank),
            columns,
            _sum(groups.masters, rank),
        )
    # The default group stays.
    assert _sum(dist.group.WORLD, rank) == found[0]
    return found


def test_rows_columns_and_masters_of_a_ragged_cluster() -> None:
    assert run_cluster((3, 2, 1), _sums) == [
        (15.0, 3.0, {0: 8.0}, 8.0),
        (15.0, 3.0, {1: 10.0}, -1.0),
        (15.0, 3.0, {2: 10.0}, -1.0),
        (15.0, 7.0, {0: 8.0, 2: 10.0}, 8.0),
        (15.0, 7.0, {1: 10.0}, -1.0),
        (15.0, 5.0, {0: 8.0, 1: 10.0, 2: 10.0}, 8.0),
    ]


def _without_parts(rank: int, nodes: tuple[int, ...]) -> bool:
    with made_groups(rank, nodes) as groups:
        return groups.has_parts


def test_over_gloo_one_group_does() -> None:
    assert run_cluster((2, 1), _without_parts) == [False] * 3


def _at_odds(rank: int, nodes: tuple[int, ...], what: str) -> str:
    place = topology(rank, nodes)
    k = 2
    if rank == 1 and what == "k":
        k = 1
    if rank == 1 and what == "node":
        place = replace(place, node_rank=0, local_rank=0)
    if rank == 1 and what == "rank":
        place = replace(place, rank=0)
    with pytest.raises(CommError) as caught:
        ProcessGroups(place, k, timeout_s=20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("k", "ranks differ in comm.group_size: 2 on rank 0, 1 on rank 1"),
        ("node", "ranks 0 and 1 are both local rank 0 of node 0"),
        ("rank", "rank 1 of torch.distributed is rank 0 in its topology"),
    ],
)
def test_ranks_at_odds_all_raise_the_same_line(what: str, words: str) -> None:
    said = run_cluster((1, 1), _at_odds, what)
    assert said[0] == said[1]
    assert words in said[0]


def _late(rank: int, nodes: tuple[int, ...]) -> str:
    groups = ProcessGroups(topology(rank, nodes), timeout_s=1)
    try:
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(torch.ones(1), group=groups.world)
            return str(caught.value)
        return ""
    finally:
        dist.barrier()
        groups.close()


def test_every_group_has_the_timeout() -> None:
    assert "1000ms" in run_cluster((2,), _late)[0]


def test_a_process_alone_needs_no_backend() -> None:
    groups = ProcessGroups(Topology())
    assert (groups.backend, groups.world, groups.layout.groups) == ("none", None, ((0,),))
    groups.close()


def test_ranks_without_a_default_group_are_told() -> None:
    with pytest.raises(CommError, match="call torch.distributed.init_process_group"):
        ProcessGroups(Topology(world_size=2, local_world_size=2))


def _gathered(rank: int) -> list[object]:
    with Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu")):
        return all_gather_json({"rank": rank, "more": "x" * 1000 * rank})


def test_values_are_gathered_as_json() -> None:
    expected = [{"rank": rank, "more": "x" * 1000 * rank} for rank in range(3)]
    assert run_ranks(3, _gathered) == [expected] * 3


def test_nothing_is_pickled_between_ranks() -> None:
    """Torch's collectives of objects unpickle what arrives, and run what it says."""
    calls = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        assert not calls.search(file.read_text()), file
