"""The parts of which the algorithms are made, in one process."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from paceline.comm.algorithms.accumulate import add_arrivals
from paceline.comm.algorithms.all_reduce import check_buffer
from paceline.comm.algorithms.catalogue import create_algorithm
from paceline.comm.algorithms.central import Central
from paceline.comm.algorithms.hierarchical import Hierarchical
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.member_sum import choose_kind
from paceline.comm.algorithms.names import ALGORITHMS
from paceline.comm.algorithms.segments import Rounds, bounds, in_step, run_segments
from paceline.comm.algorithms.staging import Staging
from paceline.comm.algorithms.tree_shape import binomial, chain, flat
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError, ConfigError
from paceline.core.topology import Topology

CPU = torch.device("cpu")


@pytest.mark.parametrize(("length", "parts"), [(0, 3), (1, 4), (7, 3), (4097, 16), (8, 8)])
def test_bounds_cover_everything_once(length: int, parts: int) -> None:
    cuts = bounds(length, parts)
    assert [at for low, high in cuts for at in range(low, high)] == list(range(length))
    assert max(high - low for low, high in cuts) - min(high - low for low, high in cuts) <= 1


@pytest.mark.parametrize("shape", [flat, chain, binomial])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 13])
def test_trees_reach_everybody_in_time(shape: object, size: int) -> None:
    members = [10 + at for at in range(size)]
    places = {rank: shape(members, rank) for rank in members}  # type: ignore[operator]
    assert places[10].parent is None
    assert sorted(c for place in places.values() for c in place.children) == members[1:]
    for rank, place in places.items():
        assert place.height <= place.levels
        for child in place.children:
            assert places[child].parent == rank
            assert places[child].height < place.height
            assert places[child].depth > place.depth


def test_segments_run_behind_one_another() -> None:
    log: list[tuple[int, int]] = []
    busy: set[int] = set()

    def start(segment: int, lane: int) -> Rounds:
        assert lane not in busy
        busy.add(lane)
        for number in range(3):
            log.append((segment, number))
            yield
        busy.discard(lane)

    run_segments(5, 2, start)
    assert sorted(log) == list(itertools.product(range(5), range(3)))
    assert log.index((1, 0)) < log.index((0, 2))
    assert log.index((2, 0)) > log.index((0, 2))


def test_in_step_takes_as_many_rounds_as_the_longest() -> None:
    assert len(list(in_step([iter([None] * 3), iter([None] * 2)]))) == 4
    assert len(list(in_step([]))) == 0


@pytest.mark.parametrize(("kind", "whole"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_arrivals_of_16_bits_are_summed_in_fp32_and_rounded_once(
    kind: torch.dtype, whole: float, count: int
) -> None:
    """The format has no odd numbers above `whole`: one by one, ones would all be lost."""
    lane = Lane(cast(ProcessGroup, None), Staging(), 0, batched=False)
    own = torch.full((3,), whole, dtype=kind)
    ones = torch.ones(3, dtype=kind)
    add_arrivals(own, iter([ones] * count), count, lane)
    assert torch.equal(own, torch.full((3,), whole + count).to(kind))


def test_staging_keeps_its_memory() -> None:
    staging = Staging()
    first = staging.take("a", 100, torch.float32, CPU)
    assert staging.take("a", 50, torch.float32, CPU).data_ptr() == first.data_ptr()
    assert staging.take("b", 50, torch.float32, CPU).data_ptr() != first.data_ptr()
    assert staging.take("a", 200, torch.float32, CPU).numel() == 200
    assert staging.held_bytes == 4 * 250


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, 4), "must be 1-D and contiguous; pass tensor.contiguous"),
        (torch.zeros(8)[::2], "must be 1-D and contiguous"),
        (torch.zeros(4, dtype=torch.int32), "all-reduce of int32; use one of: float32, float16"),
    ],
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_no_buffer_is_refused(name: str, tensor: torch.Tensor, words: str) -> None:
    algorithm = create_algorithm(name, ProcessGroups(Topology()))
    for check in (check_buffer, algorithm.all_reduce):
        with pytest.raises(CommError, match=words):
            check(tensor)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_process_alone_has_its_sum_already(name: str) -> None:
    buffer = torch.arange(5.0)
    create_algorithm(name, ProcessGroups(Topology())).all_reduce(buffer)
    assert buffer.tolist() == [0, 1, 2, 3, 4]


def test_unknown_names_are_told() -> None:
    groups = ProcessGroups(Topology())
    with pytest.raises(ConfigError, match="comm.algorithm = 'rign'.*did you mean 'ring'"):
        create_algorithm("rign", groups)
    with pytest.raises(ConfigError, match="did you mean 'flood'"):
        Hierarchical(groups, masters="floods")
    with pytest.raises(ConfigError, match="^servers = 2: must be 1 to 1"):
        Central(groups, servers=2)


def test_few_members_with_little_to_say_take_one_round() -> None:
    assert choose_kind(4, 4096) == "flood"
    assert choose_kind(4, 65536) == "exchange"
    assert choose_kind(4, 1 << 20) == "ring"
    assert choose_kind(256, 4096) == "halving_doubling"
    assert choose_kind(256, 1 << 24) == "ring"
