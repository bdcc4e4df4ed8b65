from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.errors import DataError
from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    EvalLoader,
    SampleOrder,
    TrainLoader,
    TrainTransform,
    create_eval_loader,
    create_train_loader,
)
from paceline.data.device.streams import CopyingDecoder
from paceline.data.loaders.create import create_host_decoder

Make = Callable[..., DataSettings]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def train_loader(
    source: Any,
    plan: BatchPlan,
    chosen: DataSettings,
    rank: int = 0,
    first_step: int = 0,
    seed: int = 4,
) -> TrainLoader:
    return create_train_loader(
        source, plan, chosen, seed=seed, rank=rank, first_step=first_step, device=CPU
    )


def eval_loader(
    source: Any, chosen: DataSettings, rank: int = 0, world_size: int = 1, batch_size: int = 8
) -> EvalLoader:
    return create_eval_loader(
        source, chosen, rank=rank, world_size=world_size, batch_size=batch_size, device=CPU
    )


def train_batches(source: Any, plan: BatchPlan, chosen: DataSettings, **more: Any) -> list[Batch]:
    with train_loader(source, plan, chosen, **more) as loader:
        return list(loader)


def assert_equal(got: list[Batch], want: list[Batch]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@pytest.fixture
def augmented(small_settings: Make) -> Make:
    def make(**changes: object) -> DataSettings:
        return small_settings(augment="pad_crop", flip=True, **changes)

    return make


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_the_threads(
    memory_source: Any, augmented: Make, workers: int
) -> None:
    source = memory_source(50, corrupt={7})
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    want = train_batches(source, plan, augmented(workers=0))
    got = train_batches(memory_source(50, corrupt={7}), plan, augmented(workers=workers))
    assert_equal(got, want)
    assert [b.corrupt for b in got] == [b.corrupt for b in want]
    assert sum(len(b.corrupt) for b in got) == 1


def test_every_step_can_be_resumed(memory_source: Any, augmented: Make) -> None:
    plan = BatchPlan(samples=23, epochs=2, global_batch=8, micro_batch=4, world_size=1)
    chosen = augmented(workers=1)
    source = memory_source(23, corrupt={3})
    whole = train_batches(source, plan, chosen)
    for step in range(plan.total_steps + 1):
        rest = sum(len(plan.micro_batches(s, 0)) for s in range(step, plan.total_steps))
        got = train_batches(memory_source(23, corrupt={3}), plan, chosen, first_step=step)
        assert_equal(got, whole[len(whole) - rest :])


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_samples_stop_the_run(
    memory_source: Any, small_settings: Make, workers: int
) -> None:
    source = memory_source(100, corrupt={10, 40, 70})
    plan = BatchPlan(samples=100, epochs=1, global_batch=10, micro_batch=10, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.02)
    stream = SampleOrder(100, seed=4).at(0, 100)[1].tolist()
    third = sorted(stream.index(i) for i in source.corrupt)[2] // 10
    with train_loader(source, plan, chosen, seed=4) as loader:
        assert [len(next(loader)) for _ in range(third)] == [10] * third
        with pytest.raises(DataError, match=r"3 corrupt of 100 samples \(allowed: 2\)"):
            next(loader)


def test_closing_in_the_middle(memory_source: Any, small_settings: Make) -> None:
    source = memory_source(200)
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
def test_every_sample_is_evaluated_once(
    memory_source: Any, small_settings: Make, workers: int, ranks: int
) -> None:
    source, seen = memory_source(33), []
    for rank in range(ranks):
        chosen = small_settings(workers=workers)
        with eval_loader(source, chosen, rank=rank, world_size=ranks, batch_size=4) as loader:
            labels = [label for batch in loader for label in batch.labels.tolist()]
        assert labels == list(range(rank, 33, ranks))
        assert len(labels) == len(loader)
        seen += labels
    assert sorted(seen) == list(range(33))


def test_passes_are_equal_and_corrupt_samples_listed_once(
    memory_source: Any, small_settings: Make
) -> None:
    source = memory_source(40, corrupt={5, 6, 7, 38, 39})
    chosen = small_settings(workers=2, max_corrupt_share=0.2)
    with eval_loader(source, chosen, rank=0, world_size=1, batch_size=2) as loader:
        first, second = list(loader), list(loader)
        assert [s.index for s in loader.corrupt] == [5, 6, 7, 38, 39]
    assert_equal(second, first)
    # The batch of 6 and 7 is empty, so the next one reports its corrupt samples.
    assert [(b.labels.tolist(), [s.index for s in b.corrupt]) for b in first if b.corrupt] == [
        ([4], [5]),
        ([8, 9], [6, 7]),
    ]
    assert all(not b.corrupt for b in second)
    assert sum(map(len, first)) == 35


def test_too_many_corrupt_samples_stop_the_evaluation(
    memory_source: Any, small_settings: Make
) -> None:
    source = memory_source(40, corrupt=set(range(10)))
    chosen = small_settings(workers=1, max_corrupt_share=0.1)
    with (
        eval_loader(source, chosen, rank=0, world_size=1, batch_size=8) as loader,
        pytest.raises(DataError, match=r"8 corrupt of 40 samples \(allowed: 4\)"),
    ):
        list(loader)


# --- copies to the device ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_copied_batches_are_the_same(
    memory_source: Any, small_settings: Make, workers: int
) -> None:
    plan = BatchPlan(samples=24, epochs=3, global_batch=12, micro_batch=12, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.5)
    source = memory_source(24, corrupt={3})
    decoder = CopyingDecoder(create_host_decoder(source, TrainTransform(chosen), chosen), CPU)
    with (
        train_loader(source, plan, chosen) as plain,
        TrainLoader(decoder, SampleOrder(24, 4), plan, rank=0, max_corrupt_share=0.5) as copied,
    ):
        wanted, got = list(plain), list(copied)
        assert_equal(got, wanted)
        assert [b.corrupt for b in got] == [b.corrupt for b in wanted]
        assert all(set(b.spent) == {"read", "decode", "augment"} for b in got)
        assert copied.describe() == plain.describe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("late", ["training", "copying"])
def test_on_a_gpu_batches_are_whole_whichever_stream_is_late(
    memory_source: Any, small_settings: Make, late: str
) -> None:
    """A training that does not wait for late copies would read old content."""
    source, device = memory_source(12), torch.device("cuda", torch.cuda.current_device())
    plan = BatchPlan(samples=12, epochs=3, global_batch=4, micro_batch=4, world_size=1)
    settings = small_settings(workers=2, resident="off")
    made = create_train_loader(source, plan, settings, seed=4, rank=0, first_step=0, device=device)
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
