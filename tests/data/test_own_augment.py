"""The user's own augmentation, on the host and on the device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from data.small import MemorySource, small_settings, train_loader
from paceline.core.errors import ConfigError, DataError, PacelineError, RunError
from paceline.data import (
    BatchAugment,
    BatchPlan,
    DataSettings,
    Source,
    own_augment,
)


def batches(source: Source, chosen: DataSettings, augment: Any, **more: Any) -> list[torch.Tensor]:
    plan = BatchPlan(len(source), 2, 4, 4, 1)
    with train_loader(source, plan, chosen, seed=3, augment=augment, **more) as loader:
        return [batch.images.clone() for batch in loader]


def noisy(image: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    assert image.flags.writeable
    return chance.integers(0, 256, image.shape, dtype=np.uint8)


def test_it_changes_every_image_and_no_draw_of_the_others() -> None:
    chosen = small_settings(augment="pad_crop", flip=True, cutout=3, workers=2)
    source = MemorySource(12)
    plain = batches(source, chosen, None)
    inverted = batches(source, chosen, lambda image: 255 - image)
    in_place = batches(source, chosen, lambda image: np.subtract(255, image, out=image))
    assert all(torch.equal(255 - a, b) for a, b in zip(plain, inverted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inverted, in_place, strict=True))


def test_chance_depends_on_seed_epoch_and_sample_only() -> None:
    source = MemorySource(12)
    first = batches(source, small_settings(workers=3), noisy)
    again = batches(source, small_settings(workers=0), functools.partial(noisy))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    resumed = batches(source, small_settings(), noisy, first_step=4)
    assert all(torch.equal(a, b) for a, b in zip(first[4:], resumed, strict=True))
    images = torch.cat(first)
    assert len(torch.unique(images.flatten(1), dim=0)) == 24, "other numbers in the other epoch"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda image: image[:4], r"augment: .*lambda.* returned a 4 × 8 × 1 uint8 array; return"),
        (lambda image: image.astype(np.float32), "float32 array"),
        (lambda image: None, "returned a NoneType"),
        (lambda image: image[99], "raised IndexError: index 99 .* a 8 × 8 × 1 uint8"),
    ],
)
def test_what_it_returns_is_checked(function: Any, line: str) -> None:
    with pytest.raises(DataError, match=line) as caught:
        batches(MemorySource(4), small_settings(workers=1), function)
    assert "\n" not in str(caught.value)


def test_what_it_takes_is_checked() -> None:
    class Scale:
        def __call__(self, image: np.ndarray, factor: int = 1) -> np.ndarray:
            return image * np.uint8(factor)

    source = MemorySource(4)
    assert torch.equal(
        batches(source, small_settings(), Scale())[0], batches(source, small_settings(), None)[0]
    )
    for wrong in (lambda: None, lambda a, b, c: a, 5):
        with pytest.raises(ConfigError, match="augment"):
            batches(source, small_settings(), wrong)


def test_where_it_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"data.resident = 'on': `augment` is done on the host"):
        batches(MemorySource(4), small_settings(resident="on"), lambda image: image)
    with pytest.raises(ConfigError, match=r"data.decoder = 'nvjpeg'.*`device_augment`"):
        batches(MemorySource(4), DataSettings(decoder="nvjpeg"), lambda image: image)


def test_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    images[:, 3] = 0
    seen: list[torch.Size] = []

    def double(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.shape)
        return batch * 2

    found = BatchAugment(double, 3)(images)
    assert seen == [torch.Size([2, 3, 5, 5])], "channels that were added for speed are hidden"
    assert torch.equal(found, images * 2)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for wrong, line in (
        (
            lambda x: x[:1],
            "returned a 1 × 3 × 5 × 5 float32 tensor on cpu; return",
        ),
        (lambda x: x.double(), "float64"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: x.view(7), "raised RuntimeError"),
    ):
        with pytest.raises(RunError, match=f"device_augment: .*{line}"):
            BatchAugment(wrong, 3)(images)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(own_augment, "_capturing", lambda batch: True)
        with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
            BatchAugment(lambda x: x.view(7), 3)(images)
        assert not isinstance(caught.value, PacelineError), "the capture ends, not the run"
    with pytest.raises(ConfigError, match="not callable"):
        BatchAugment(3, 3)  # type: ignore[arg-type]
