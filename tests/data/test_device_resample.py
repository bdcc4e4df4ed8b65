from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.augmentation.augment import RESAMPLING, random_box
from paceline.data.on_device.device_resample import resample
from paceline.data.randomness import uniform

SAMPLES = 40


def crops(
    width: int, height: int, channels: int, size: int, interpolation: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same random boxes of the same noise, by Pillow and by us; every second one flipped."""
    random = np.random.default_rng(width)
    images = random.integers(0, 256, (SAMPLES, height, width, channels), dtype=np.uint8)
    indices = np.arange(SAMPLES)
    rows = uniform(0, np.zeros_like(indices), indices, 23).tolist()
    boxes = [random_box(width, height, row, (0.08, 1.0), (3 / 4, 4 / 3)) for row in rows]
    boxes[0] = (0, 0, width, height)
    want = np.empty((SAMPLES, size, size, channels), dtype=np.uint8)
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
