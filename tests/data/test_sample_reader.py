from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.augmentation.augment import EvalTransform, TrainTransform
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.decoding.preparer import PillowPreparer
from paceline.data.order import SampleOrder
from paceline.data.prefetch import Stopped
from paceline.data.randomness import uniform
from paceline.data.sample_reader import SampleReader
from paceline.data.settings import DataSettings

Make = Callable[..., DataSettings]


def read_stream(
    source: Any, chosen: DataSettings, start: int, count: int, seed: int = 0, share: float = 0.3
) -> tuple[np.ndarray, np.ndarray, list[CorruptSample]]:
    log = CorruptLog(len(source), share)
    prepare = PillowPreparer(TrainTransform(chosen), chosen.channels)
    reader = SampleReader(source, prepare, log)
    images = np.zeros((count, 8, 8, 1), dtype=np.uint8)
    labels = np.zeros(count, dtype=np.int64)
    order = SampleOrder(len(source), seed)
    return images, labels, reader.fill_stream(order, start, images, labels, lambda: None)


def test_rows_follow_the_stream(memory_source: Any, small_settings: Make) -> None:
    images, labels, met = read_stream(memory_source(10), small_settings(), 4, 12)
    want = SampleOrder(10, 0).at(4, 16)[1].tolist()
    assert labels.tolist() == want
    assert images[:, 3, 5, 0].tolist() == want
    assert met == []


def test_a_corrupt_sample_gives_its_row_to_its_successor(
    memory_source: Any, small_settings: Make
) -> None:
    stream = SampleOrder(10, 0).at(0, 30)[1].tolist()
    bad = {stream[3], stream[4]}
    images, labels, met = read_stream(memory_source(10, bad), small_settings(), 0, 10)
    want = [*stream[:3], stream[5], stream[5], *stream[5:10]]
    assert labels.tolist() == want
    assert images[:, 0, 0, 0].tolist() == want
    assert [sample.index for sample in met] == [stream[3], stream[4], stream[4]]
    assert met[0] == CorruptSample(stream[3], f"memory:{stream[3]}", met[0].reason)
    assert "not a JPEG" in met[0].reason


def test_the_successor_may_lie_in_the_next_epoch(memory_source: Any, small_settings: Make) -> None:
    stream = SampleOrder(10, 0).at(0, 30)[1].tolist()
    _, labels, _ = read_stream(memory_source(10, {stream[9]}), small_settings(), 9, 1)
    successor = stream[10] if stream[10] != stream[9] else stream[11]
    assert labels.tolist() == [successor]


def test_the_successor_is_augmented_as_at_its_own_place(
    memory_source: Any, small_settings: Make
) -> None:
    chosen = small_settings(augment="pad_crop", crop_padding=3, flip=True)
    epochs, stream = SampleOrder(10, 0).at(0, 30)
    images, _, _ = read_stream(memory_source(10, {int(stream[2])}), chosen, 2, 2)
    np.testing.assert_array_equal(images[0], images[1])
    row = uniform(0, epochs[3:4], stream[3:4], 3)[0]
    dark = np.count_nonzero(images[1] == 0)
    shift = [abs(3 - int(u * 7)) for u in row[1:]]
    assert dark == 64 - (8 - shift[0]) * (8 - shift[1])


def test_a_corrupt_sample_is_decoded_once(memory_source: Any, small_settings: Make) -> None:
    source = memory_source(6, {2})
    read_stream(source, small_settings(), 0, 60)
    assert source.reads.count(2) == 1


def test_all_corrupt_ends(memory_source: Any, small_settings: Make) -> None:
    with pytest.raises(DataError, match=r"corrupt of 50 samples \(allowed: 15\)"):
        read_stream(memory_source(50, set(range(50))), small_settings(), 0, 4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_corrupt_ends_where_the_limit_would_allow_it(
    memory_source: Any, small_settings: Make, count: int
) -> None:
    with pytest.raises(DataError, match=f"{count} corrupt of {count} samples"):
        read_stream(memory_source(count, set(range(count))), small_settings(), 0, 4, share=0.99)


@pytest.mark.parametrize("seed", range(20))
def test_one_good_sample_of_two_is_found_across_epochs(
    memory_source: Any, small_settings: Make, seed: int
) -> None:
    """The corrupt one may come twice in a row, at an epoch's end and the next one's start."""
    _, labels, _ = read_stream(memory_source(2, {0}), small_settings(), 0, 20, seed=seed)
    assert set(labels.tolist()) == {1}


def test_a_failing_disk_is_no_corrupt_sample(memory_source: Any, small_settings: Make) -> None:
    source = memory_source(5)
    source.failure = DataError("disk gone")
    with pytest.raises(DataError, match="disk gone"):
        read_stream(source, small_settings(), 0, 2)


def test_closing_does_not_wait_for_a_successor(memory_source: Any, small_settings: Make) -> None:
    """Many samples in a row may be corrupt: nobody wants the result, so none is read any more."""
    chosen, source = small_settings(), memory_source(50, set(range(50)))
    log, wanted = CorruptLog(50, 0.9), iter(range(4))
    reader = SampleReader(source, PillowPreparer(TrainTransform(chosen), 1), log)
    images, labels = np.zeros((1, 8, 8, 1), np.uint8), np.zeros(1, np.int64)

    def check() -> None:
        if next(wanted, None) is None:
            raise Stopped

    with pytest.raises(Stopped):
        reader.fill_stream(SampleOrder(50, 0), 0, images, labels, check)
    assert len(source.reads) == 4


class Causes:
    def __init__(self) -> None:
        self.added: list[str] = []

    def add(self, cause: str, seconds: float) -> None:
        assert seconds > 0
        self.added.append(cause)


def test_what_the_time_goes_into(memory_source: Any, small_settings: Make) -> None:
    """A sample that is known to be corrupt costs nothing."""
    chosen, clock = small_settings(), Causes()
    prepare = PillowPreparer(EvalTransform(chosen), chosen.channels)
    reader = SampleReader(memory_source(3, {1}), prepare, CorruptLog(3, 0.5), clock)
    images, labels = np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, np.int64)
    for _ in range(2):
        unfilled = reader.fill_indices(np.arange(3), images, labels, lambda: None)
        assert [row for row, _ in unfilled] == [1]
    good = ["read", "decode", "augment"]
    assert clock.added == [*good, "read", *good, *good, *good]
