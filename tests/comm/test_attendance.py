"""Counters of arrival: the last rank knows that it is the last, and missing ranks can be named."""

from __future__ import annotations

import random

import pytest
from torch.distributed import HashStore

from paceline.comm.job import Attendance


@pytest.mark.parametrize("size", [1, 2, 59, 60, 61, 120, 4096])
def test_exactly_the_last_of_all_ranks_completes_the_attendance(size: int) -> None:
    point = Attendance(HashStore(), "start", size)
    ranks = random.Random(size).sample(range(size), size)
    assert [point.arrive(rank) for rank in ranks] == [False] * (size - 1) + [True]
    assert point.missing() == []


def test_the_missing_ranks_are_known() -> None:
    point = Attendance(HashStore(), "start", 130)
    for rank in set(range(130)) - {0, 59, 60, 129}:
        assert not point.arrive(rank)
    assert point.missing() == [0, 59, 60, 129]
