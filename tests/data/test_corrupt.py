from __future__ import annotations

import pytest

from paceline.core.errors import DataError
from paceline.data.corrupt import CorruptLog, CorruptSample


def sample(index: int) -> CorruptSample:
    return CorruptSample(index, f"shard:{index}.jpg", "truncated")


@pytest.mark.parametrize(
    ("samples", "share", "limit"),
    [(1000, 0.01, 10), (1000, 0.0, 0), (5, 0.01, 1), (1_281_167, 0.001, 1281)],
)
def test_limit(samples: int, share: float, limit: int) -> None:
    assert CorruptLog(samples, share).limit == limit


def test_each_is_reported_once_in_the_order_met() -> None:
    log = CorruptLog(100, 0.5)
    assert log.report([sample(5), sample(3), sample(5)]) == (sample(5), sample(3))
    assert log.report([sample(3), sample(9)]) == (sample(9),)
    assert log.reported == (sample(5), sample(3), sample(9))


def test_known_before_it_is_reported() -> None:
    log = CorruptLog(100, 0.5)
    assert log.known(4) is None
    log.add(sample(4))
    assert log.known(4) == sample(4)
    assert log.reported == ()


def test_more_than_allowed() -> None:
    log = CorruptLog(100, 0.02)
    log.report([sample(1), sample(2), sample(1)])
    with pytest.raises(
        DataError,
        match=r"3 corrupt of 100 samples \(allowed: 2\); the first: shard:1\.jpg: truncated; .*"
        r"data\.max_corrupt_share",
    ):
        log.report([sample(3)])


def test_none_allowed() -> None:
    with pytest.raises(DataError, match="1 corrupt of 100"):
        CorruptLog(100, 0).report([sample(1)])


def test_all_corrupt_is_never_allowed() -> None:
    with pytest.raises(DataError, match="1 corrupt of 1 "):
        CorruptLog(1, 0.9).report([sample(0)])
