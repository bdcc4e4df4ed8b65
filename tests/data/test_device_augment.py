from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from data.small import small_settings
from paceline.data import DataSettings, TrainTransform, random_box
from paceline.data.augment import RESAMPLING
from paceline.data.device import augment as module
from paceline.data.device.augment import AugmentNumbers, DeviceAugment, random_boxes, resample
from paceline.data.device.resident import ResidentSet
from paceline.data.order import uniform

SAMPLES, BATCH, CROPS = 30, 200, 40


def held_noise(side: int, channels: int, device: str = "cpu") -> ResidentSet:
    pixels = torch.from_numpy(
        np.random.default_rng(0).integers(1, 256, (SAMPLES * side * side + 1, channels), np.uint8)
    )
    pixels[-1] = 0
    labels = torch.arange(SAMPLES)
    return ResidentSet(pixels.to(device), labels.to(device), (side, side, channels), {})


def both_ways(held: ResidentSet, chosen: DataSettings) -> tuple[np.ndarray, np.ndarray]:
    """The same samples with the same uniform numbers: one by one on the host, all on the device."""
    indices = np.arange(BATCH) * 7 % SAMPLES
    numbers = AugmentNumbers(chosen, *held.shape[:2])
    rows = uniform(5, np.arange(BATCH), indices, numbers.draws)
    drawn = np.empty((numbers.count, BATCH), dtype=np.int64)
    numbers.fill(rows, drawn)
    there = [torch.from_numpy(a).to(held.device) for a in (indices, drawn)]
    got = DeviceAugment(held.pixels, held.shape, chosen)(*there)
    transform = TrainTransform(chosen)
    want = np.empty(got.shape, dtype=np.uint8)
    for i, index in enumerate(indices.tolist()):
        pixels = held.images[index].cpu().numpy()
        image = Image.fromarray(pixels if held.shape[2] == 3 else pixels[..., 0])
        transform(image, rows[i].tolist(), want[i])
    return got.cpu().numpy(), want


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("augment", "padding"), [("none", 2), ("pad_crop", 2), ("pad_crop", 7)])
def test_shifts_and_flips_pixel_by_pixel(
    augment: str, padding: int, flip: bool, channels: int
) -> None:
    chosen = small_settings(augment=augment, flip=flip, crop_padding=padding, channels=channels)
    got, want = both_ways(held_noise(8, channels), chosen)
    assert np.array_equal(got, want)
    assert (got == 0).any() == (augment == "pad_crop")


@pytest.mark.parametrize("augment", ["none", "pad_crop", "random_resized_crop"])
@pytest.mark.parametrize("cutout", [2, 3, 7])
def test_cutouts_pixel_by_pixel(augment: str, cutout: int) -> None:
    """Everywhere, whole or cut off by an edge; the other choices stay as they were."""
    chosen = small_settings(augment=augment, flip=True, cutout=cutout)
    got, want = both_ways(held_noise(8, 1), chosen)
    assert np.array_equal(got, want)
    whole, _ = both_ways(held_noise(8, 1), small_settings(augment=augment, flip=True))
    blank = ((got == 0) & (whole > 0))[..., 0]
    assert (got[~blank] == whole[~blank]).all()
    assert blank.sum(axis=(1, 2)).max() <= cutout**2
    if augment == "none":
        assert blank.any(axis=0).all()
        assert blank.sum(axis=(1, 2)).max() == cutout**2
        assert blank.sum(axis=(1, 2)).min() >= (cutout // 2) ** 2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_boxes_pixel_by_pixel(interpolation: str) -> None:
    chosen = small_settings(augment="random_resized_crop", flip=True, interpolation=interpolation)
    got, want = both_ways(held_noise(19, 1), chosen)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("augment", ["pad_crop", "random_resized_crop"])
def test_pieces_make_no_difference(augment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, held = small_settings(augment=augment, flip=True), held_noise(8, 1)
    whole, _ = both_ways(held, chosen)
    for limit in (1, 64 * 8 * 33):
        monkeypatch.setattr(module, "_CHUNK_BYTES", limit)
        assert np.array_equal(both_ways(held, chosen)[0], whole)


def rows(count: int, draws: int) -> np.ndarray:
    indices = np.arange(count)
    return uniform(1, np.zeros_like(indices), indices, draws)


@pytest.mark.parametrize(
    ("width", "height", "scale", "ratio"),
    [
        (64, 64, (0.08, 1.0), (3 / 4, 4 / 3)),
        (500, 375, (0.08, 1.0), (3 / 4, 4 / 3)),
        (1, 1, (0.5, 1.0), (3 / 4, 4 / 3)),
        (90, 10, (0.9, 1.0), (3 / 4, 4 / 3)),  # nearly always the central box
        (10, 90, (0.9, 1.0), (3 / 4, 4 / 3)),
        (30, 30, (0.8, 1.0), (0.2, 5.0)),  # now a try, now the centre
    ],
)
def test_boxes_are_those_of_one_image_at_a_time(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    drawn = rows(3000, 23)
    want = [random_box(width, height, row, scale, ratio) for row in drawn.tolist()]
    got = random_boxes(width, height, drawn, scale, ratio)
    assert got.T.tolist() == [list(box) for box in want]


def crops(
    width: int, height: int, channels: int, size: int, interpolation: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same random boxes of the same noise, by Pillow and by us; every second one flipped."""
    random = np.random.default_rng(width)
    images = random.integers(0, 256, (CROPS, height, width, channels), dtype=np.uint8)
    indices = np.arange(CROPS)
    rows = uniform(0, np.zeros_like(indices), indices, 23).tolist()
    boxes = [random_box(width, height, row, (0.08, 1.0), (3 / 4, 4 / 3)) for row in rows]
    boxes[0] = (0, 0, width, height)
    want = np.empty((CROPS, size, size, channels), dtype=np.uint8)
    for i, (pixels, box) in enumerate(zip(images, boxes, strict=True)):
        image = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
        image = image.resize((size, size), RESAMPLING[interpolation], box=box)
        want[i] = np.asarray(image).reshape(size, size, channels)[:, :: -1 if i % 2 else 1]
    got = resample(
        torch.from_numpy(images),
        torch.tensor(boxes).T.unbind(),
        torch.from_numpy(indices % 2),
        size,
        interpolation,
    )
    assert got.dtype == torch.uint8
    return got.numpy(), want


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "nearest"])
@pytest.mark.parametrize(
    ("width", "height", "channels", "size"),
    [
        (64, 64, 3, 64),  # mostly enlarged
        (64, 64, 1, 20),  # mostly shrunk
        (50, 33, 3, 31),
        (8, 8, 1, 8),
        (33, 90, 3, 20),  # rows first, from Pillow 13 on
    ],
)
def test_as_pillow_does(
    interpolation: str, width: int, height: int, channels: int, size: int
) -> None:
    got, want = crops(width, height, channels, size, interpolation)
    assert np.array_equal(got, want)


def test_half_precision_around_it_does_not_reach_it() -> None:
    plain, _ = crops(64, 64, 3, 32, "bilinear")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = crops(64, 64, 3, 32, "bilinear")
    assert np.array_equal(plain, inside)


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["none", "pad_crop", "random_resized_crop"])
def test_on_the_gpu(augment: str) -> None:
    chosen = small_settings(augment=augment, flip=True, channels=3)
    got, want = both_ways(held_noise(8, 3, "cuda"), chosen)
    assert np.array_equal(got, want)
