"""Which samples a chunk shows: the stream, and the successors of corrupt samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data import CorruptSample, DataSettings, EvalTransform, SampleOrder, TrainTransform
from paceline.data.batch import Chunk, CorruptLog
from paceline.data.decode.decoder import PillowDecoder
from paceline.data.order import uniform
from paceline.data.prefetch import Progress

Make = Callable[..., DataSettings]


def sample(index: int) -> CorruptSample:
    return CorruptSample(index, f"shard:{index}.jpg", "truncated")


@pytest.mark.parametrize(
    ("samples", "share", "limit"),
    [(1000, 0.01, 10), (1000, 0.0, 0), (5, 0.01, 1), (1_281_167, 0.001, 1281)],
)
def test_limit_of_corrupt_samples(samples: int, share: float, limit: int) -> None:
    assert CorruptLog(samples, share).limit == limit


def test_each_is_reported_once_in_the_order_met() -> None:
    log = CorruptLog(100, 0.03, [sample(4)])
    assert log.known(4) == sample(4)
    assert log.reported == ()
    assert log.report([sample(5), sample(3), sample(5)]) == (sample(5), sample(3))
    assert log.report([sample(3), sample(9)]) == (sample(9),)
    assert log.reported == (sample(5), sample(3), sample(9))
    with pytest.raises(DataError, match=r"4 corrupt of 100 samples \(allowed: 3\); the first: sh"):
        log.report([sample(1)])


def read_stream(
    source: Any, chosen: DataSettings, start: int, count: int, seed: int = 0, share: float = 0.3
) -> tuple[np.ndarray, np.ndarray, list[CorruptSample]]:
    """Fills a batch as a loader does."""
    decoder = PillowDecoder(source, TrainTransform(chosen), channels=chosen.channels)
    log, order = CorruptLog(len(source), share), SampleOrder(len(source), seed)
    chunk = Chunk.of_stream(order, start, (0, count), decoder.draws, log, Progress())
    images = np.zeros((count, 8, 8, 1), dtype=np.uint8)
    decoder.fill(chunk, images)
    return images, source.labels[chunk.indices], chunk.corrupt


def test_a_corrupt_sample_gives_its_row_to_its_successor(
    memory_source: Any, small_settings: Make
) -> None:
    stream = SampleOrder(10, 0).at(0, 30)[1].tolist()
    bad = {stream[3], stream[4]}
    source = memory_source(10, bad)
    images, labels, met = read_stream(source, small_settings(), 0, 10)
    want = [*stream[:3], stream[5], stream[5], *stream[5:10]]
    assert labels.tolist() == want
    assert images[:, 0, 0, 0].tolist() == want
    assert [found.index for found in met] == [stream[3], stream[4], stream[4]]
    assert met[0] == CorruptSample(stream[3], f"memory:{stream[3]}", met[0].reason)
    assert "not a JPEG" in met[0].reason
    assert [source.reads.count(index) for index in bad] == [1, 1]  # then they are known


def test_the_successor_is_augmented_as_at_its_own_place(
    memory_source: Any, small_settings: Make
) -> None:
    chosen = small_settings(augment="pad_crop", crop_padding=3, flip=True)
    epochs, stream = SampleOrder(10, 0).at(0, 30)
    images, _, _ = read_stream(memory_source(10, {int(stream[2])}), chosen, 2, 2)
    np.testing.assert_array_equal(images[0], images[1])
    row = uniform(0, epochs[3:4], stream[3:4], 3)[0]
    shift = [abs(3 - int(u * 7)) for u in row[1:]]
    assert np.count_nonzero(images[1] == 0) == 64 - (8 - shift[0]) * (8 - shift[1])


@pytest.mark.parametrize(("count", "share"), [(50, 0.3), (1, 0.99), (2, 0.99), (3, 0.99)])
def test_all_corrupt_ends(
    memory_source: Any, small_settings: Make, count: int, share: float
) -> None:
    with pytest.raises(DataError, match=f"corrupt of {count} samples"):
        read_stream(memory_source(count, set(range(count))), small_settings(), 0, 4, share=share)


def test_evaluation_drops_rows_and_a_known_corrupt_sample_costs_nothing(
    memory_source: Any, small_settings: Make
) -> None:
    source, log = memory_source(6, {4}), CorruptLog(6, 0.5)
    decoder = PillowDecoder(source, EvalTransform(small_settings()), channels=1)
    for reads in ([3, 4, 5], [3, 5]):
        source.reads.clear()
        chunk = Chunk.of_indices(np.arange(6), (3, 6), log, Progress())
        images = np.zeros((3, 8, 8, 1), np.uint8)
        decoder.fill(chunk, images)
        assert source.reads == reads
        assert chunk.dropped == [4]
        assert [found.index for found in chunk.corrupt] == [4]
        assert images[[0, 2], 0, 0, 0].tolist() == [3, 5]
        assert set(chunk.progress.spent) == {"read", "decode", "augment"}
        assert min(chunk.progress.spent.values()) > 0
