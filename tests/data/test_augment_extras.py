from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import ConfigError
from paceline.data.augmentation.augment import TrainTransform, draws
from paceline.data.augmentation.augment_extras import _OPERATIONS, apply_extras, extra_draws
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_train_loader
from paceline.data.loader import TrainLoader
from paceline.data.on_device.device_reader import check_settings
from paceline.data.settings import DataSettings

JITTER = (0.4, 0.3, 0.2, 0.1)


def pixels(channels: int = 3, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size, size, channels), dtype=np.uint8)


def test_off_by_default_and_then_the_row_is_as_it_was() -> None:
    plain = DataSettings()
    assert extra_draws(plain) == 0
    both = DataSettings(color_jitter=JITTER, randaugment=(2, 9))
    assert extra_draws(both) == 5 + 4
    assert draws(both) == draws(plain) + 9


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("settings", [{"color_jitter": JITTER}, {"randaugment": (3, 15)}])
def test_the_numbers_alone_decide(settings: dict[str, Any], channels: int) -> None:
    made = DataSettings(**settings)
    results = []
    for seed in (1, 1, 2):
        numbers = np.random.default_rng(seed).random(extra_draws(made)).tolist()
        out = pixels(channels)
        apply_extras(made, numbers, out)
        results.append(out)
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    assert results[0].shape == (16, 16, channels)


def test_jitter_is_what_pillow_and_the_formula_say() -> None:
    bright = DataSettings(color_jitter=(0.5, 0, 0, 0))
    for number, factor in ((0.0, 0.5), (0.5, 1.0), (0.999999, 1.5)):
        out = pixels()
        apply_extras(bright, [number, 0, 0, 0, 0.3], out)
        wanted = np.clip(pixels() * factor, 0, 255)
        assert np.abs(out.astype(float) - wanted).max() <= 1
    hue = DataSettings(color_jitter=(0, 0, 0, 0.5))
    out = np.zeros((4, 4, 3), dtype=np.uint8)
    out[..., 0] = 200
    apply_extras(hue, [0, 0, 0, 0.5 + 1 / 3, 0.9], out)  # a third of the circle: red to green
    assert out[..., 1].min() > 190
    assert out[..., 0].max() < 20


def test_every_operation_keeps_size_and_mode_and_zero_magnitude_changes_little() -> None:
    for mode in ("RGB", "L"):
        image = Image.fromarray(pixels()).convert(mode)
        changed = 0
        for operation in _OPERATIONS:
            for signed in (-0.5, 0.5):
                result = operation(image, signed)
                assert (result.size, result.mode) == (image.size, image.mode)
                changed += result.tobytes() != image.tobytes()
            if operation not in _OPERATIONS[-2:]:  # these two have no strength
                assert operation(image, 0.0).tobytes() == image.tobytes()
        assert changed >= 20


def test_a_transform_applies_them_to_the_crop_before_the_hole() -> None:
    common = {"image_size": 16, "eval_resize": 0, "cutout": 8, "flip": False}
    settings = DataSettings(color_jitter=JITTER, **common)
    row = np.random.default_rng(4).random(draws(settings)).tolist()
    image = Image.fromarray(pixels(size=40))
    out, plain = np.empty((2, 16, 16, 3), dtype=np.uint8)
    TrainTransform(settings)(image, row, out)
    bare = DataSettings(**{**common, "cutout": 0})
    TrainTransform(bare)(image, row[: draws(bare)], plain)
    apply_extras(settings, row[draws(bare) : -2], plain)
    hole = (out == 0).all(axis=2)
    assert 16 <= hole.sum() <= 64
    assert np.array_equal(out[~hole], plain[~hole])


def test_workers_do_not_matter(
    memory_source: Any, small_settings: Callable[..., DataSettings]
) -> None:
    stream = io.BytesIO()
    Image.fromarray(pixels(size=8)).save(stream, "PNG")
    batches = []
    for workers in (0, 3):
        source = memory_source(12)
        source._images = [stream.getvalue()] * 12
        settings = small_settings(
            channels=3, workers=workers, color_jitter=JITTER, randaugment=(2, 20)
        )
        plan = BatchPlan(12, 1, 12, 12, 1)
        with TrainLoader(source, plan, settings, seed=5, rank=0) as loader:
            batches.append(next(loader).images)
    assert torch.equal(batches[0], batches[1])
    assert len({tuple(image.flatten().tolist()) for image in batches[0]}) > 6


def test_where_the_host_does_not_prepare_they_are_refused(
    memory_source: Any, small_settings: Callable[..., DataSettings]
) -> None:
    settings = small_settings(randaugment=(1, 9), resident="on")
    plan = BatchPlan(12, 1, 12, 12, 1)
    with pytest.raises(ConfigError, match="data.resident = 'on'.*set data.resident = 'off'"):
        create_train_loader(
            memory_source(12), plan, settings, seed=0, rank=0, first_step=0,
            device=torch.device("cpu"),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="cannot do data.color_jitter"):
        check_settings(DataSettings(decoder="nvjpeg", color_jitter=JITTER))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"color_jitter": (0.1, 0.1, 0.1)}, "data.color_jitter"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.6)}, "hue"),
        ({"color_jitter": (-0.1, 0, 0, 0)}, "0 or more"),
        ({"randaugment": (2, 31)}, "a magnitude of 0 to 30"),
        ({"randaugment": (-1, 9)}, "data.randaugment"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataSettings(**changes)
