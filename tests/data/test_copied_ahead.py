from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.errors import DataError
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_train_loader
from paceline.data.loader import TrainLoader
from paceline.data.on_device.copied_ahead import CopiedAhead

pytestmark = pytest.mark.usefixtures("no_leaked_threads")
CPU = torch.device("cpu")
PLAN = BatchPlan(samples=12, epochs=3, global_batch=4, micro_batch=4, world_size=1)


def loader(source: Any, settings: Any, **more: Any) -> TrainLoader:
    return TrainLoader(source, PLAN, settings, seed=1, rank=0, **more)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_in_the_same_order_then_the_end(
    memory_source: Any, small_settings: Callable[..., Any], workers: int
) -> None:
    settings = small_settings(workers=workers, max_corrupt_share=0.5)
    source = memory_source(12, corrupt={3})
    with loader(source, settings) as plain, CopiedAhead(loader(source, settings), CPU) as ahead:
        wanted, got = list(plain), list(ahead)
        assert len(got) == 9
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.labels, b.labels)
            assert a.corrupt == b.corrupt
            assert set(b.spent) == {"read", "decode", "augment"}
        assert ahead.corrupt == plain.corrupt
        assert ahead.describe() == plain.describe()
        with pytest.raises(StopIteration):
            next(ahead)


def test_it_takes_one_batch_ahead_and_no_more_than_it_may(
    memory_source: Any, small_settings: Callable[..., Any]
) -> None:
    source = memory_source(12)
    settings = small_settings(workers=0)
    with CopiedAhead(loader(source, settings), CPU) as ahead:
        next(ahead)
        third = threading.Event()
        for _ in range(200):
            if len(source.reads) >= 12:
                break
            third.wait(0.01)
        # The batch handed over and two more: nothing was asked for, yet they are there.
        assert len(source.reads) == 12
        third.wait(0.05)
        assert len(source.reads) == 12


def test_an_error_surfaces_where_its_batch_was_due(
    memory_source: Any, small_settings: Callable[..., Any]
) -> None:
    source = memory_source(12)
    with CopiedAhead(loader(source, small_settings(workers=0)), CPU) as ahead:
        source.failure = None
        next(ahead)
        source.failure = DataError("the disk is gone")
        with pytest.raises(DataError, match="the disk is gone"):
            list(ahead)
        with pytest.raises(RuntimeError, match="closed"):
            next(ahead)


def test_it_closes_in_the_middle_of_a_read(
    memory_source: Any, small_settings: Callable[..., Any]
) -> None:
    source = memory_source(12)
    source.gate = threading.Event()
    ahead = CopiedAhead(loader(source, small_settings(workers=1)), CPU)

    def take() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            next(ahead)

    taker = threading.Thread(target=take)
    taker.start()
    while not source.reads:
        pass
    source.gate.set()
    ahead.close()
    taker.join(20)
    assert not taker.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("late", ["training", "copying"])
def test_on_a_gpu_batches_are_there_whole_whichever_stream_is_late(
    memory_source: Any, small_settings: Callable[..., Any], late: str
) -> None:
    """With the copies late, a training that did not wait for them would read what was there before."""
    source, device = memory_source(12), torch.device("cuda", torch.cuda.current_device())
    settings = small_settings(workers=2, resident="off")
    made = create_train_loader(source, PLAN, settings, seed=1, rank=0, first_step=0, device=device)
    assert isinstance(made, CopiedAhead)
    copying = torch.cuda.Stream(device)
    made._stream = copying  # its own, made here to be kept busy
    sums, wanted = [], []
    with made, loader(source, settings) as plain:
        for host in plain:
            if late == "copying":
                # In front of the copies queued from here on: those of the batches after the next two.
                with torch.cuda.stream(copying):
                    torch.cuda._sleep(20_000_000)
            batch = next(made)
            if late == "training":
                torch.cuda._sleep(20_000_000)  # the copies run on while this stream is late
            sums.append(batch.images.sum(dtype=torch.int64) + batch.labels.sum())
            wanted.append(int(host.images.sum(dtype=torch.int64) + host.labels.sum()))
            del batch  # its memory is the next copies'
    assert [int(total) for total in sums] == wanted
