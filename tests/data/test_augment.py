from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.small import MemorySource, small_settings, train_loader
from paceline.core.errors import ConfigError
from paceline.data import (
    BatchPlan,
    DataSettings,
    EvalTransform,
    SyntheticImages,
    TrainTransform,
)
from paceline.data.augment import (
    _OPERATIONS,
    apply_extras,
    draws,
    extra_draws,
    random_box,
)
from paceline.data.decode.decoder import PillowDecoder
from paceline.data.order import uniform
from paceline.data.prefetch import Progress

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
JITTER = (0.4, 0.3, 0.2, 0.1)


def rows(count: int, draws: int, seed: int = 0) -> list[list[float]]:
    indices = np.arange(count)
    return uniform(seed, np.zeros_like(indices), indices, draws).tolist()


def photo(width: int, height: int, channels: int = 3) -> Image.Image:
    """Smooth shapes with some texture, so that a shift by a pixel shows."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + c)) * 60 + np.cos(y / (4 + c)) * 60 + 128 for c in range(channels)]
    noise = np.random.default_rng(0).integers(-7, 7, (height, width, channels))
    pixels = (np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels if channels == 3 else pixels[..., 0])


def apply(transform: object, image: Image.Image, row: Sequence[float], size: int) -> np.ndarray:
    channels = 1 if image.mode == "L" else 3
    out = np.full((size, size, channels), 199, dtype=np.uint8)
    transform(image, row, out)
    return out


# --- pixels in memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "augment", "more"),
    [
        (3, "pad_crop", {"crop_padding": 2, "cutout": 4}),
        (1, "pad_crop", {"crop_padding": 2, "cutout": 4}),
        (3, "none", {}),
        (1, "none", {}),
        (3, "none", {"randaugment": (1, 9)}),
        (3, "random_resized_crop", {}),
    ],
)
def test_arrays_of_the_right_size_become_what_their_images_become(
    channels: int, augment: str, more: dict[str, Any]
) -> None:
    chosen = DataSettings(image_size=16, augment=augment, channels=channels, eval_resize=0, **more)
    transform = TrainTransform(chosen)
    decoder = PillowDecoder(SyntheticImages(4, 2, 16, channels), transform, channels=channels)
    array = pixels(channels)
    image = Image.fromarray(array if channels == 3 else array[..., 0])
    for row in rows(24, transform.draws):
        out, expected = np.full_like(array, 199), np.full_like(array, 199)
        decoder.prepare(array, row, out, Progress())
        square = image.resize((16, 16), Image.Resampling.BILINEAR, transform.box(16, 16, row))
        if transform.flips(row):
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        expected[...] = np.asarray(square).reshape(array.shape)
        transform.finish(row, expected)
        assert np.array_equal(out, expected)


# --- random resized crop -----------------------------------------------------------------------


def exact_sides(width: int, height: int, row: Sequence[float]) -> np.ndarray:
    """Width and height of all ten tries at once, before rounding."""
    tries = np.asarray(row[3:23]).reshape(10, 2)
    area = float(width * height) * (SCALE[0] + (SCALE[1] - SCALE[0]) * tries[:, 0])
    logs = np.log(RATIO)
    aspect = np.exp(logs[0] + (logs[1] - logs[0]) * tries[:, 1])
    return np.sqrt([area * aspect, area / aspect])


def reference_box(width: int, height: int, row: Sequence[float]) -> tuple[int, int, int, int]:
    """The published algorithm: the first try that fits, or the largest box in the centre."""
    w, h = np.rint(exact_sides(width, height, row)).astype(int)
    fits = (w >= 1) & (h >= 1) & (w <= width) & (h <= height)
    if fits.any():
        first = int(np.argmax(fits))
        w, h = int(w[first]), int(h[first])
        top = math.floor(row[1] * (height - h + 1))
        left = math.floor(row[2] * (width - w + 1))
    else:
        w, h = width, height
        if width / height < RATIO[0]:
            h = round(w / RATIO[0])
        elif width / height > RATIO[1]:
            w = round(h * RATIO[1])
        top, left = (height - h) // 2, (width - w) // 2
    return left, top, left + w, top + h


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=23, max_size=23),
)
def test_box_equals_the_reference(width: int, height: int, row: list[float]) -> None:
    # Half-way between whole numbers the last bit of an exponential decides: nothing to compare.
    assume((abs(exact_sides(width, height, row) % 1 - 0.5) > 1e-9).all())
    box = random_box(width, height, row, SCALE, RATIO)
    assert box == reference_box(width, height, row)
    left, top, right, bottom = box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_narrow_ratios_of_a_tiny_image_leave_a_pixel() -> None:
    for row in rows(20, 23):
        for low, high in ((0.1, 0.2), (5.0, 9.0)):
            left, top, right, bottom = random_box(1, 1, row, SCALE, (low, high))
            assert (left, top, right, bottom) == (0, 0, 1, 1)


def triangle_resize(pixels: np.ndarray, size: int, box: Sequence[float]) -> np.ndarray:
    """Bilinear with anti-aliasing, straight from its definition: a triangle as wide as the scale."""

    def weights(length: int, low: float, high: float) -> np.ndarray:
        scale = (high - low) / size
        centres = low + (np.arange(size) + 0.5) * scale
        distance = abs(np.arange(length)[None] + 0.5 - centres[:, None]) / max(scale, 1.0)
        kernel = np.maximum(0, 1 - distance)
        return kernel / kernel.sum(1, keepdims=True)

    height, width = pixels.shape[:2]
    down, across = weights(height, box[1], box[3]), weights(width, box[0], box[2])
    return np.einsum("ih,hwc,jw->ijc", down, pixels.astype(float), across)


def test_random_resized_crop_equals_the_reference() -> None:
    chosen = DataSettings(image_size=32, eval_resize=0, flip=True)
    transform, image = TrainTransform(chosen), photo(90, 70)
    flipped = 0
    for row in rows(14, transform.draws):
        want = triangle_resize(np.asarray(image), 32, reference_box(90, 70, row))
        if row[0] < 0.5:
            want = want[:, ::-1]
            flipped += 1
        got = apply(transform, image, row, 32).astype(float)
        assert abs(got - want).max() <= 1.01
    assert 3 < flipped < 11


# --- padding and crop --------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_pad_crop_equals_the_reference(channels: int) -> None:
    chosen = small_settings(augment="pad_crop", crop_padding=3, flip=True, channels=channels)
    transform, image = TrainTransform(chosen), photo(8, 8, channels)
    pixels = np.asarray(image).reshape(8, 8, channels)
    padded = np.zeros((14, 14, channels), dtype=np.uint8)
    padded[3:11, 3:11] = pixels
    places = set()
    for row in rows(400, transform.draws):
        top, left = math.floor(row[1] * 7), math.floor(row[2] * 7)
        want = padded[top : top + 8, left : left + 8]
        want = want[:, ::-1] if row[0] < 0.5 else want
        np.testing.assert_array_equal(apply(transform, image, row, 8), want)
        places.add((top, left, row[0] < 0.5))
    assert len(places) > 90  # of 98


# --- evaluation --------------------------------------------------------------------------------


@given(st.integers(20, 150), st.integers(20, 150), st.integers(24, 48))
@settings(max_examples=60)
def test_evaluation_equals_scaling_all_then_cutting(width: int, height: int, short: int) -> None:
    transform = EvalTransform(DataSettings(image_size=24, eval_resize=short))
    image = photo(width, height)
    shorter = min(width, height)
    scaled = image.resize(
        (int(short * width / shorter), int(short * height / shorter)), Image.Resampling.BILINEAR
    )
    left, top = round((scaled.width - 24) / 2.0), round((scaled.height - 24) / 2.0)
    want = np.asarray(scaled.crop((left, top, left + 24, top + 24))).astype(int)
    difference = abs(apply(transform, image, (), 24) - want)
    # Pillow keeps 8 bits between its two passes, so ties may round either way in each; a shift by a
    # quarter of a pixel would change the mean by several levels.
    assert difference.max() <= 2
    assert difference.mean() < 0.5


# --- colour jitter and RandAugment -----------------------------------------------------------------


def pixels(channels: int = 3, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size, size, channels), dtype=np.uint8)


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


def test_where_the_host_does_not_prepare_they_are_refused() -> None:
    settings = small_settings(randaugment=(1, 9), resident="on")
    plan = BatchPlan(12, 1, 12, 12, 1)
    with pytest.raises(ConfigError, match="data.resident = 'on'.*set data.resident = 'off'"):
        train_loader(MemorySource(12), plan, settings, seed=0)
    with pytest.raises(ConfigError, match="cannot do data.color_jitter"):
        DataSettings(decoder="nvjpeg", color_jitter=JITTER)


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
