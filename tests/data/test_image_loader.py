"""`ImageLoader`: the batches of the training, for a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.small import MemorySource, train_loader
from data_sets import write_folders
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    BatchPlan,
    DataSettings,
    ImageLoader,
    Normalizer,
)

CPU = torch.device("cpu")
Batches = list[tuple[torch.Tensor, torch.Tensor]]
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def loader(source: Any, batch_size: int = 4, **values: Any) -> ImageLoader:
    given = {"image_size": 8, "channels": 1, "device": "cpu", "seed": 3, "workers": 2}
    return ImageLoader(source, batch_size, **{**given, **values})


def labels(batches: Batches) -> list[int]:
    return [int(label) for _, found in batches for label in found]


def same(left: Batches, right: Batches) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(left, right, strict=True)
    )


def test_batches_are_those_of_the_training() -> None:
    source = MemorySource(12)
    settings = DataSettings(image_size=8, channels=1)
    normalize = Normalizer(settings.mean, settings.std, 1)
    with train_loader(source, BatchPlan(12, 2, 4, 4, 1), settings, seed=3) as training:
        wanted = [(normalize(b.images, CPU).clone(), b.labels.clone()) for b in training]
    with loader(source) as ours:
        found = [*ours, *ours]
        assert (len(ours), ours.epoch) == (3, 2)
        assert ours.describe().startswith("2 threads")
    assert same(found, wanted)
    assert found[0][0].shape == (4, 1, 8, 8)


@pytest.mark.parametrize("samples", [12, 13, 15, 16, 23, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_in_an_epoch_over_all_ranks(samples: int, drop_last: bool) -> None:
    source, world = MemorySource(samples), 3
    if samples < 12 and drop_last:
        with pytest.raises(
            DataError, match="3 images are too few for 3 ranks with batches of 4 and"
        ):
            loader(source, rank=0, world_size=world, drop_last=True)
        return
    ours = [loader(source, rank=r, world_size=world, drop_last=drop_last) for r in range(world)]
    for _ in range(2):
        found = [list(each) for each in ours]
        assert {len(batches) for batches in found} == {len(ours[0])}, "or a collective would hang"
        seen = [label for batches in found for label in labels(batches)]
        if drop_last:
            assert len(seen) == len(set(seen)) == samples // 12 * 12
            assert {len(y) for batches in found for _, y in batches} == {4}
        else:
            assert sorted(seen) == list(range(samples))
            assert all(len(y) for batches in found for _, y in batches)


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(DataError, match="2 images are too few for 3 ranks .*; use fewer ranks"):
        loader(MemorySource(2), rank=0, world_size=3)
    found = []
    for rank in range(3):
        with loader(MemorySource(10), 1, rank=rank, world_size=3) as ours:
            found.append([len(y) for _, y in ours])
    assert sorted(found) == [[1, 1, 1], [1, 1, 1], [1, 1, 2]]


def test_a_position_in_an_epoch_is_found_again() -> None:
    source = MemorySource(14)
    with loader(source) as ours:
        whole = [*ours, *ours]
    for stop in range(len(whole) + 1):
        with loader(source) as ours, loader(source) as other:
            taken: Batches = []
            while len(taken) < stop:
                for batch in ours:
                    taken.append(batch)
                    if len(taken) == stop:
                        state = ours.state_dict()
                        break
            other.load_state_dict(ours.state_dict() if not stop else state)
            rest: Batches = []
            for epoch in range(other.epoch, 2):
                other.set_epoch(epoch)  # as loops with torch's sampler do; keeps the position
                rest += list(other)
            assert same(taken + rest, whole)
    with loader(source) as ours:
        first = [next(iter(ours)), *ours]
        assert same(first, whole[:4]), "an epoch that was left goes on"
        ours.set_epoch(0)
        assert same(list(ours), whole[:4])
        with pytest.raises(ConfigError, match=r"seed = 3: the saved state has 4"):
            ours.load_state_dict(loader(source, seed=4).state_dict())
        with pytest.raises(ConfigError, match=r"batch: is missing"):
            ours.load_state_dict({"epoch": 1})


def test_evaluation_is_a_pass_in_order(tmp_path: Path) -> None:
    write_folders(tmp_path, train=12, val=10)
    (tmp_path / "val" / "a" / "0000.png").write_bytes(b"no image")
    with loader(tmp_path, train=False, dtype=torch.float16, layout="NHWC") as ours:
        one, two = list(ours), list(ours)
        assert (len(ours), len(one), len(ours.corrupt)) == (3, 3, 1)
        assert same(one, two)
        images = one[0][0]
        assert images.dtype == torch.float16
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert ours.classes == ["a", "b", "c", "d"]
    parts = [loader(tmp_path, train=False, rank=r, world_size=2) for r in range(2)]
    assert sorted(y for part in parts for y in labels(list(part))) == sorted(labels(one))
    for part in parts:
        part.close()


def test_other_data_and_own_augmentation() -> None:
    pictures = [(np.full((9, 9), i, np.uint8), i % 2) for i in range(8)]
    with loader(pictures, settings={"data.val_split": 0.25}) as part:
        assert len(labels(list(part))) == 6
    chosen = {"augment": "none", "flip": False}
    with loader(pictures, mean=[0.0], std=[1.0], settings=chosen, augment=lambda x: x + 1) as ours:
        found = list(ours)
    values = sorted(round(float(image.mean()) * 255) for images, _ in found for image in images)
    assert values == list(range(1, 9))


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"layout": "CHW"}, {"dtype": torch.int8}, {"rank": 2, "world_size": 2}],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"ImageLoader: {next(iter(wrong))}"):
        loader(MemorySource(8), **{"batch_size": 4, **wrong})


@pytest.mark.gpu
@pytest.mark.parametrize("resident", ["on", "off"])
def test_on_a_gpu(resident: str) -> None:
    source = MemorySource(14)
    settings = {"resident": resident}
    with (
        loader(source) as host,
        loader(source, device="cuda", settings=settings, layout="NHWC") as ours,
    ):
        wanted, found = list(host), list(ours)
    assert all(images.is_cuda and y.is_cuda for images, y in found)
    for (images, y), (host_images, host_y) in zip(found, wanted, strict=True):
        assert torch.equal(y.cpu(), host_y)
        torch.testing.assert_close(images.cpu().contiguous(), host_images)
