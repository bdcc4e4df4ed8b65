"""The crop kernel against Pillow; run by test_crop_kernel.py in Triton's interpreter."""

from __future__ import annotations

import interpreted  # noqa: F401  # isort: skip  (before any kernel's module)

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.on_device import crop_kernel as kernel

# Shrunk, stretched, kept; at edges and corners; wholly and hardly anything of the image.
BOXES = [
    ((12, 9), (0, 0, 12, 9)),
    ((12, 9), (7, 2, 9, 4)),
    ((7, 15), (1.25, 3.5, 6.75, 14.125)),
    ((5, 5), (0, 0, 5, 5)),
    ((1, 1), (0, 0, 1, 1)),
    ((14, 3), (0.5, 0.25, 13.5, 2.75)),
]


def pixels(width: int, height: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def crop(
    images: list[np.ndarray], boxes: list[tuple[float, ...]], flips: list[bool], size: int,
    *, interleaved: bool, hole: int = 0, corners: list[tuple[int, int]] | None = None,
) -> np.ndarray:  # fmt: skip
    held = [
        torch.from_numpy(image if interleaved else image.transpose(2, 0, 1).copy())
        for image in images
    ]
    table, doubles = kernel.new_table(len(images))
    for i, image in enumerate(held):
        height, width, _ = images[i].shape
        corner = corners[i] if corners else (0, 0)
        # Backwards, so that a target is not its place in the table.
        target = len(held) - 1 - i
        table[i, :7] = (image.data_ptr(), height, width, flips[i], target, *corner)
        doubles[i, kernel.BOX :] = boxes[i]
    out = torch.zeros((len(images), size, size, 3), dtype=torch.uint8)
    kernel.crop_into(out, torch.from_numpy(table), hole=hole, interleaved=interleaved)
    return out.numpy()[::-1]


def by_pillow(image: np.ndarray, box: tuple[float, ...], flip: bool, size: int) -> np.ndarray:
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box)
    turned = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else square
    return np.asarray(turned)


@pytest.mark.parametrize(("interleaved", "cases"), [(False, BOXES), (True, BOXES[1:3])])
def test_every_box_is_pillows_within_a_level(
    interleaved: bool, cases: list[tuple[tuple[int, int], tuple[float, ...]]]
) -> None:
    size = 5
    images = [pixels(*sides, seed) for seed, (sides, _) in enumerate(cases)]
    boxes = [box for _, box in cases]
    flips = [bool(i % 2) for i in range(len(cases))]
    found = crop(images, boxes, flips, size, interleaved=interleaved)
    for image, box, flip, got in zip(images, boxes, flips, found, strict=True):
        wanted = by_pillow(image, box, flip, size)
        apart = np.abs(got.astype(int) - wanted.astype(int))
        assert apart.max() <= 1
        # Where a sum lies halfway between two levels, and where Pillow sums down first.
        assert (apart > 0).mean() < 0.25


def test_a_hole_is_where_the_host_has_it() -> None:
    image = np.full((20, 20, 3), 200, dtype=np.uint8)
    corners = [(2, 5), (-2, 7)]
    found = crop(
        [image, image], [(0, 0, 20, 20)] * 2, [False, True], 10, interleaved=False, hole=4,
        corners=corners,
    )  # fmt: skip
    for got, (top, left) in zip(found, corners, strict=True):
        wanted = np.full((10, 10, 3), 200, dtype=np.uint8)
        wanted[max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
        assert np.array_equal(got, wanted)


def test_an_empty_table_writes_nothing() -> None:
    assert crop([], [], [], 8, interleaved=False).shape == (0, 8, 8, 3)
