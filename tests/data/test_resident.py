"""Resident sets. The batches of the host's threads are the reference: a resident set must give the
same."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.small import CPU, MemorySource, assert_equal, eval_loader, small_settings, train_loader
from no_waiting import no_waiting
from paceline.core.errors import DataError
from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    EvalLoader,
    TrainLoader,
)
from paceline.data.device import resident as module
from paceline.data.device.resident import PixelForm, resident_set
from paceline.data.sources.array_sets import Cifar10

GPU = torch.device("cuda")
FORM = PixelForm(1, 8, 8, "bilinear")
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def loader(
    where: str, source: Any, plan: BatchPlan, chosen: DataSettings, **more: Any
) -> TrainLoader:
    """Creates a loader with `data.resident` = `where`."""
    return train_loader(source, plan, replace(chosen, resident=where), **more)


def passes(where: str, source: Any, chosen: DataSettings, **more: Any) -> EvalLoader:
    return eval_loader(source, replace(chosen, resident=where), **more)


def batches(where: str, source: Any, plan: BatchPlan, chosen: DataSettings) -> list[Batch]:
    with loader(where, source, plan, chosen) as made:
        return list(made)


def augmented(**changes: object) -> DataSettings:
    return small_settings(**{"augment": "pad_crop", "flip": True, **changes})


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("size", [8, 13])
@pytest.mark.parametrize("augment", ["none", "pad_crop"])
@pytest.mark.parametrize("corrupt", [set(), {7}, {1, 2, 3, 4, 30}])
def test_batches_are_those_of_the_threads(
    workers: int, size: int, augment: str, corrupt: set[int]
) -> None:
    chosen = augmented(workers=workers, augment=augment, max_corrupt_share=0.2)
    source = MemorySource(50, corrupt, size)
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    got = batches("on", source, plan, chosen)
    assert_equal(got, batches("off", source, plan, chosen))
    assert sum(len(batch.corrupt) for batch in got) == len(corrupt)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_samples_stop_the_run_at_the_same_batch(workers: int) -> None:
    source = MemorySource(100, corrupt={10, 40, 70})
    plan = BatchPlan(samples=100, epochs=1, global_batch=10, micro_batch=10, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.02)
    ends = []
    for where in ("off", "on"):
        sizes: list[int] = []
        made = loader(where, source, plan, chosen)
        with made, pytest.raises(DataError, match=r"3 corrupt of 100 samples") as caught:
            sizes.extend(len(batch) for batch in made)
        ends.append((len(made.corrupt), str(caught.value), sizes))
    assert ends[0] == ends[1]


# --- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("corrupt", [set(), {5, 6, 7, 38, 39}])
def test_passes_are_those_of_the_threads(ranks: int, corrupt: set[int]) -> None:
    source = MemorySource(40, corrupt, size=11)
    chosen = small_settings(max_corrupt_share=0.2, eval_resize=10)
    for rank in range(ranks):
        share = {"rank": rank, "world_size": ranks, "batch_size": 2}
        with (
            passes("off", source, chosen, **share) as reference,
            passes("on", source, chosen, **share) as made,
        ):
            for _ in range(2):
                assert_equal(list(made), list(reference))
            assert made.corrupt == reference.corrupt
            assert len(made) == len(reference)


# --- the set -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
def test_every_sample_lies_at_its_index(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 70 * 64)  # several pieces of several chunks
    source = MemorySource(250, corrupt={3, 249}, size=12)
    held = resident_set(source, FORM, workers, CPU)
    want = torch.arange(250)
    want[[3, 249]] = 0
    assert torch.equal(held.images, want.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 1))
    assert held.labels.tolist() == list(range(250))
    assert {index: sample.name for index, sample in held.corrupt.items()} == {
        3: "memory:3",
        249: "memory:249",
    }
    assert held.describe() == "resident on cpu, 0 MiB"


def test_pixels_that_lie_ready_are_taken_as_they_are(tmp_path: Path, small_cifar: Any) -> None:
    source = Cifar10(small_cifar.write(tmp_path, "bin"), "train")
    source.read = lambda i: pytest.fail(f"sample {i} was read")  # type: ignore[method-assign]
    held = resident_set(source, PixelForm(3, 32, 32, "bilinear"), 2, CPU)
    assert np.array_equal(held.images.numpy(), source.pixels)
    assert held.pixels[-1].tolist() == [0, 0, 0]


def test_decoded_once_as_long_as_the_source_lives() -> None:
    source = MemorySource(20)
    held = resident_set(source, FORM, 0, CPU)
    assert resident_set(source, FORM, 2, CPU) is held
    assert len(source.reads) == 20
    assert resident_set(source, PixelForm(1, 8, 9, "bilinear"), 0, CPU) is not held
    assert resident_set(MemorySource(20), FORM, 0, CPU) is not held
    gone = weakref.ref(held)
    del held, source
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
def test_the_host_never_waits_for_the_gpu() -> None:
    source, chosen = MemorySource(50, {7}), augmented(workers=1)
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    found = []
    with (
        loader("on", source, plan, chosen, device=GPU) as train,
        passes("on", MemorySource(50), chosen, device=GPU, batch_size=20) as evaluation,
        no_waiting(),
    ):
        found += list(train)
        list(evaluation)
    assert all(b.images.is_cuda and b.labels.is_cuda for b in found)
    assert_equal(found, batches("off", source, plan, chosen))
