from __future__ import annotations

import os

import pytest
import torch

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.data.corrupt import CorruptSample
from paceline.train.run_state import CorruptTally, Progress
from ranks import run_ranks

CPU = torch.device("cpu")


def sample(index: int) -> CorruptSample:
    return CorruptSample(index, f"shard:{index}", "cut short")


def tally(progress: Progress, share: float = 0.5) -> CorruptTally:
    return CorruptTally(progress, 10, share, Group(Topology(), CommSettings(), CPU))


def test_a_sample_is_new_once_also_after_a_resume() -> None:
    progress = Progress()
    first = tally(progress)
    assert first.add([sample(7), sample(2)]) == [sample(7), sample(2)]
    assert first.add([sample(7), sample(3)]) == [sample(3)]
    assert (progress.corrupt, progress.corrupt_samples) == ([2, 3, 7], 3)
    resumed = Progress.from_table(progress.to_table())
    assert tally(resumed).add([sample(2)]) == []
    assert resumed.corrupt_samples == 3


@pytest.mark.parametrize(("share", "allowed"), [(0.0, 0), (0.01, 1), (0.29, 2)])
def test_more_than_the_share_is_an_error(share: float, allowed: int) -> None:
    progress = Progress(step=4)
    found = tally(progress, share)
    for index in range(allowed):
        found.add([sample(index)])
        found.check()
    found.add([sample(9)])
    with pytest.raises(
        RunError, match=rf"{allowed + 1} corrupt of 10 samples by step 4, more than"
    ):
        found.check()


def _two(rank: int) -> tuple[list[int], list[int]]:
    group = Group(Topology.from_env(os.environ), CommSettings(), CPU)
    try:
        progress = Progress()
        shared = CorruptTally(progress, 10, 0.5, group)
        shared.add([sample(1)] if rank == 0 else [])
        new = shared.add([sample(1), sample(8)] if rank == 1 else [sample(8)])
        return progress.corrupt, [found.index for found in new]
    finally:
        group.close()


def test_ranks_hold_the_union_and_each_names_its_own() -> None:
    assert run_ranks(2, _two) == [([1, 8], [8]), ([1, 8], [8])]
