"""The threaded loaders are the reference: what they give, the resident ones must give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from no_waiting import no_waiting
from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.on_device.pixel_form import PixelForm
from paceline.data.on_device.resident_loader import ResidentEvalLoader, ResidentTrainLoader
from paceline.data.on_device.resident_set import ResidentSet, resident_set
from paceline.data.settings import DataSettings
from paceline.data.sources.source import open_source

Make = Callable[..., DataSettings]
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def held(source: Any, chosen: DataSettings, device: str = "cpu") -> ResidentSet:
    form = PixelForm.for_training(chosen)
    shape = form.shape(source)
    assert shape is not None
    return resident_set(source, form, shape, 0, torch.device(device))


def resident(
    source: Any, plan: BatchPlan, chosen: DataSettings, rank: int = 0, first_step: int = 0
) -> list[Batch]:
    with ResidentTrainLoader(
        held(source, chosen), plan, chosen, seed=4, rank=rank, first_step=first_step
    ) as loader:
        return list(loader)


def threaded(source: Any, plan: BatchPlan, chosen: DataSettings, rank: int = 0) -> list[Batch]:
    with TrainLoader(source, plan, chosen, seed=4, rank=rank) as loader:
        return list(loader)


def assert_equal(got: list[Batch], want: list[Batch], corrupt: bool = True) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.images.cpu(), b.images)
        assert torch.equal(a.labels.cpu(), b.labels)
        assert not corrupt or a.corrupt == b.corrupt


@pytest.fixture
def augmented(small_settings: Make) -> Make:
    def make(**changes: object) -> DataSettings:
        return small_settings(**{"augment": "pad_crop", "flip": True, **changes})

    return make


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("size", [8, 13])
@pytest.mark.parametrize("augment", ["none", "pad_crop"])
@pytest.mark.parametrize("corrupt", [set(), {7}, {1, 2, 3, 4, 30}])
def test_batches_are_those_of_the_threads(
    memory_source: Any, augmented: Make, workers: int, size: int, augment: str, corrupt: set[int]
) -> None:
    chosen = augmented(workers=workers, augment=augment, max_corrupt_share=0.2)
    source = memory_source(50, corrupt, size)
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    got = resident(source, plan, chosen)
    assert_equal(got, threaded(source, plan, chosen))
    assert sum(len(batch.corrupt) for batch in got) == len(corrupt)


def test_boxes_too(tiny_imagenet: Path) -> None:
    chosen = DataSettings(dir=str(tiny_imagenet), image_size=48, eval_resize=56)
    source = open_source(chosen, "val")
    plan = BatchPlan(len(source), 1, len(source), 625, 1)
    got, want = resident(source, plan, chosen)[1], threaded(source, plan, chosen)[1]
    assert torch.equal(got.labels, want.labels)
    assert torch.equal(got.images, want.images)
    source.close()


def test_every_step_can_be_resumed(memory_source: Any, augmented: Make) -> None:
    plan = BatchPlan(samples=23, epochs=2, global_batch=8, micro_batch=4, world_size=1)
    chosen, source = augmented(workers=1), memory_source(23, corrupt={3})
    whole = resident(source, plan, chosen)
    for step in range(plan.total_steps + 1):
        rest = sum(len(plan.micro_batches(s, 0)) for s in range(step, plan.total_steps))
        got = resident(source, plan, chosen, first_step=step)
        assert_equal(got, whole[len(whole) - rest :], corrupt=False)


@pytest.mark.parametrize("augment", ["pad_crop", "random_resized_crop"])
def test_ranks_share_out_what_one_would_take(
    memory_source: Any, augmented: Make, augment: str
) -> None:
    source, chosen = memory_source(31), augmented(augment=augment)
    alone = resident(source, BatchPlan(31, 2, 12, 2, 1), chosen)
    plan = BatchPlan(31, 2, 12, 2, 3)
    shares = [iter(resident(source, plan, chosen, rank)) for rank in range(3)]
    merged = []
    for step in range(plan.total_steps):
        pieces = sum(len(plan.micro_batches(step, rank)) for rank in range(3))
        merged += [next(shares[j % 3]) for j in range(pieces)]
    assert_equal(merged, alone)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_samples_stop_the_run_at_the_same_batch(
    memory_source: Any, small_settings: Make, workers: int
) -> None:
    source = memory_source(100, corrupt={10, 40, 70})
    plan = BatchPlan(samples=100, epochs=1, global_batch=10, micro_batch=10, world_size=1)
    chosen = small_settings(workers=workers, max_corrupt_share=0.02)
    ends = []
    for loader in (
        TrainLoader(source, plan, chosen, seed=4, rank=0),
        ResidentTrainLoader(held(source, chosen), plan, chosen, seed=4, rank=0),
    ):
        sizes: list[int] = []
        with loader, pytest.raises(DataError, match=r"3 corrupt of 100 samples") as caught:
            sizes.extend(len(batch) for batch in loader)
        ends.append((len(loader.corrupt), str(caught.value), sizes))
    assert ends[0] == ends[1]


def test_all_corrupt_ends(memory_source: Any, small_settings: Make) -> None:
    chosen = small_settings(max_corrupt_share=0.9)
    with pytest.raises(DataError, match="corrupt of 20 samples"):
        resident(memory_source(20, corrupt=set(range(20))), BatchPlan(20, 1, 4, 4, 1), chosen)


def test_closing_in_the_middle(memory_source: Any, augmented: Make) -> None:
    source, chosen = memory_source(40), augmented(workers=2)
    plan = BatchPlan(samples=40, epochs=90, global_batch=20, micro_batch=20, world_size=1)
    loader = ResidentTrainLoader(held(source, chosen), plan, chosen, seed=0, rank=0)
    next(loader)
    assert sum(t.name.startswith("paceline-data") for t in threading.enumerate()) == 1
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_plan_for_other_data(memory_source: Any, small_settings: Make) -> None:
    plan, chosen = BatchPlan(20, 1, 4, 4, 1), small_settings()
    with pytest.raises(ValueError, match="a plan for 20 samples, a source of 19"):
        ResidentTrainLoader(held(memory_source(19), chosen), plan, chosen, seed=0, rank=0)


# --- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("corrupt", [set(), {5, 6, 7, 38, 39}])
def test_passes_are_those_of_the_threads(
    memory_source: Any, small_settings: Make, ranks: int, corrupt: set[int]
) -> None:
    source = memory_source(40, corrupt, size=11)
    chosen = small_settings(max_corrupt_share=0.2, eval_resize=10)
    form = PixelForm.for_evaluation(chosen)
    there = resident_set(source, form, (8, 8, 1), 0, torch.device("cpu"))
    for rank in range(ranks):
        share = {"rank": rank, "world_size": ranks, "batch_size": 2}
        with (
            EvalLoader(source, chosen, **share) as reference,
            ResidentEvalLoader(there, chosen, **share) as loader,
        ):
            for _ in range(2):
                assert_equal(list(loader), list(reference))
            assert loader.corrupt == reference.corrupt
            assert len(loader) == len(reference)


def test_too_many_corrupt_samples_stop_the_evaluation(
    memory_source: Any, small_settings: Make
) -> None:
    chosen = small_settings(max_corrupt_share=0.1)
    there = held(memory_source(40, corrupt=set(range(10))), chosen)
    with (
        ResidentEvalLoader(there, chosen, rank=0, world_size=1, batch_size=8) as loader,
        pytest.raises(DataError, match=r"8 corrupt of 40 samples \(allowed: 4\)"),
    ):
        list(loader)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("augment", ["pad_crop", "random_resized_crop"])
def test_the_host_never_waits_for_the_gpu(
    memory_source: Any, augmented: Make, augment: str
) -> None:
    source, chosen = memory_source(50, {7}), augmented(workers=1, augment=augment)
    plan = BatchPlan(samples=50, epochs=3, global_batch=40, micro_batch=20, world_size=1)
    there = held(source, chosen, "cuda")
    batches = []
    with (
        ResidentTrainLoader(there, plan, chosen, seed=4, rank=0) as train,
        ResidentEvalLoader(there, chosen, rank=0, world_size=1, batch_size=20) as evaluation,
        no_waiting(),
    ):
        batches += list(train)
        if augment == "pad_crop":
            list(evaluation)
    assert all(b.images.is_cuda and b.labels.is_cuda for b in batches)
    assert_equal(batches, threaded(source, plan, chosen))
