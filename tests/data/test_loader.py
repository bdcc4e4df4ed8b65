"""Loaders, and which samples a chunk shows: the stream, and the successors of corrupt samples."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from data.small import CPU, MemorySource, assert_equal, eval_loader, small_settings, train_loader
from paceline.core.errors import DataError
from paceline.data import (
    Batch,
    BatchPlan,
    CorruptSample,
    DataSettings,
    EvalTransform,
    SampleOrder,
    TrainLoader,
    TrainTransform,
)
from paceline.data.batch import Chunk, CorruptLog
from paceline.data.decode.decoder import PillowDecoder
from paceline.data.device.streams import CopyingDecoder
from paceline.data.loaders.create import create_host_decoder
from paceline.data.order import uniform
from paceline.data.prefetch import Progress

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def train_batches(source: Any, plan: BatchPlan, chosen: DataSettings, **more: Any) -> list[Batch]:
    with train_loader(source, plan, chosen, **more) as loader:
        return list(loader)


def augmented(**changes: object) -> DataSettings:
    return small_settings(augment="pad_crop", flip=True, **changes)


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_the_threads(workers: int) -> None:
    source = MemorySource(50, corrupt={7})
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    want = train_batches(source, plan, augmented(workers=0))
    got = train_batches(MemorySource(50, corrupt={7}), plan, augmented(workers=workers))
    assert_equal(got, want)
    assert sum(len(b.corrupt) for b in got) == 1


def test_every_step_can_be_resumed() -> None:
    plan = BatchPlan(samples=23, epochs=2, global_batch=8, micro_batch=4, world_size=1)
    chosen = augmented(workers=1)
    source = MemorySource(23, corrupt={3})
    whole = train_batches(source, plan, chosen)
    for step in range(plan.total_steps + 1):
        rest = sum(len(plan.micro_batches(s, 0)) for s in range(step, plan.total_steps))
        got = train_batches(MemorySource(23, corrupt={3}), plan, chosen, first_step=step)
        assert_equal(got, whole[len(whole) - rest :], corrupt=False)  # met again


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_samples_stop_the_run(workers: int) -> None:
    source = MemorySource(100, corrupt={10, 40, 70})
    plan = BatchPlan(samples=100, epochs=1, global_batch=10, micro_batch=10, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.02)
    stream = SampleOrder(100, seed=4).at(0, 100)[1].tolist()
    third = sorted(stream.index(i) for i in source.corrupt)[2] // 10
    with train_loader(source, plan, chosen) as loader:
        assert [len(next(loader)) for _ in range(third)] == [10] * third
        with pytest.raises(DataError, match=r"3 corrupt of 100 samples \(allowed: 2\)"):
            next(loader)


def test_closing_in_the_middle() -> None:
    source = MemorySource(200)
    plan = BatchPlan(samples=200, epochs=50, global_batch=20, micro_batch=20, world_size=1)
    loader = train_loader(source, plan, small_settings(workers=2), seed=0)
    next(loader)
    source.gate = threading.Event()
    threading.Timer(0.05, source.gate.set).start()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    loader.close()


# --- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_sample_is_evaluated_once(workers: int, ranks: int) -> None:
    source, seen = MemorySource(33), []
    for rank in range(ranks):
        chosen = small_settings(workers=workers)
        with eval_loader(source, chosen, rank=rank, world_size=ranks, batch_size=4) as loader:
            labels = [label for batch in loader for label in batch.labels.tolist()]
        assert labels == list(range(rank, 33, ranks))
        assert len(labels) == len(loader)
        seen += labels
    assert sorted(seen) == list(range(33))


def test_passes_are_equal_and_corrupt_samples_listed_once() -> None:
    source = MemorySource(40, corrupt={5, 6, 7, 38, 39})
    chosen = small_settings(workers=2, max_corrupt_share=0.2)
    with eval_loader(source, chosen, rank=0, world_size=1, batch_size=2) as loader:
        first, second = list(loader), list(loader)
        assert [s.index for s in loader.corrupt] == [5, 6, 7, 38, 39]
    assert_equal(second, first, corrupt=False)
    # The batch of 6 and 7 is empty, so the next one reports its corrupt samples.
    assert [(b.labels.tolist(), [s.index for s in b.corrupt]) for b in first if b.corrupt] == [
        ([4], [5]),
        ([8, 9], [6, 7]),
    ]
    assert all(not b.corrupt for b in second)
    assert sum(map(len, first)) == 35


def test_too_many_corrupt_samples_stop_the_evaluation() -> None:
    source = MemorySource(40, corrupt=set(range(10)))
    chosen = small_settings(workers=1, max_corrupt_share=0.1)
    with (
        eval_loader(source, chosen, rank=0, world_size=1, batch_size=8) as loader,
        pytest.raises(DataError, match=r"8 corrupt of 40 samples \(allowed: 4\)"),
    ):
        list(loader)


# --- copies to the device ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_copied_batches_are_the_same(workers: int) -> None:
    plan = BatchPlan(samples=24, epochs=3, global_batch=12, micro_batch=12, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.5)
    source = MemorySource(24, corrupt={3})
    decoder = CopyingDecoder(create_host_decoder(source, TrainTransform(chosen), chosen), CPU)
    with (
        train_loader(source, plan, chosen) as plain,
        TrainLoader(decoder, SampleOrder(24, 4), plan, rank=0, max_corrupt_share=0.5) as copied,
    ):
        wanted, got = list(plain), list(copied)
        assert_equal(got, wanted)
        assert all(set(b.spent) == {"read", "decode", "augment"} for b in got)
        assert copied.describe() == plain.describe()


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["training", "copying"])
def test_on_a_gpu_batches_are_whole_whichever_stream_is_late(late: str) -> None:
    """A training that does not wait for late copies would read old content."""
    source, device = MemorySource(12), torch.device("cuda", torch.cuda.current_device())
    plan = BatchPlan(samples=12, epochs=3, global_batch=4, micro_batch=4, world_size=1)
    settings = small_settings(workers=2, resident="off")
    made = train_loader(source, plan, settings, device=device)
    decoder = made._decoder
    assert isinstance(decoder, CopyingDecoder)
    stream = torch.cuda.Stream(device)
    decoder._stream = stream  # its own, made here to be kept busy
    sums, wanted = [], []
    with made, train_loader(source, plan, settings) as plain:
        for host in plain:
            if late == "copying":
                # In front of the copies queued from here on: those of the batches after the next two.
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
            batch = next(made)
            assert batch.images.is_cuda
            if late == "training":
                torch.cuda._sleep(20_000_000)  # the copies run on while this stream is late
            sums.append(batch.images.sum(dtype=torch.int64) + batch.labels.sum())
            wanted.append(int(host.images.sum(dtype=torch.int64) + host.labels.sum()))
            del batch  # its memory is the next copies'
    assert [int(total) for total in sums] == wanted


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


def test_a_corrupt_sample_gives_its_row_to_its_successor() -> None:
    stream = SampleOrder(10, 0).at(0, 30)[1].tolist()
    bad = {stream[3], stream[4]}
    source = MemorySource(10, bad)
    images, labels, met = read_stream(source, small_settings(), 0, 10)
    want = [*stream[:3], stream[5], stream[5], *stream[5:10]]
    assert labels.tolist() == want
    assert images[:, 0, 0, 0].tolist() == want
    assert [found.index for found in met] == [stream[3], stream[4], stream[4]]
    assert met[0] == CorruptSample(stream[3], f"memory:{stream[3]}", met[0].reason)
    assert "not a JPEG" in met[0].reason
    assert [source.reads.count(index) for index in bad] == [1, 1]  # then they are known


def test_the_successor_is_augmented_as_at_its_own_place() -> None:
    chosen = small_settings(augment="pad_crop", crop_padding=3, flip=True)
    epochs, stream = SampleOrder(10, 0).at(0, 30)
    images, _, _ = read_stream(MemorySource(10, {int(stream[2])}), chosen, 2, 2)
    np.testing.assert_array_equal(images[0], images[1])
    row = uniform(0, epochs[3:4], stream[3:4], 3)[0]
    shift = [abs(3 - int(u * 7)) for u in row[1:]]
    assert np.count_nonzero(images[1] == 0) == 64 - (8 - shift[0]) * (8 - shift[1])


@pytest.mark.parametrize(("count", "share"), [(50, 0.3), (1, 0.99), (2, 0.99), (3, 0.99)])
def test_all_corrupt_ends(count: int, share: float) -> None:
    with pytest.raises(DataError, match=f"corrupt of {count} samples"):
        read_stream(MemorySource(count, set(range(count))), small_settings(), 0, 4, share=share)


def test_evaluation_drops_rows_and_a_known_corrupt_sample_costs_nothing() -> None:
    source, log = MemorySource(6, {4}), CorruptLog(6, 0.5)
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
