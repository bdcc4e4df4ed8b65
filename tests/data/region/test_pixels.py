"""Squares of pixels in memory are Pillow's, bit by bit; what is no such image is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from data import small
from paceline.data.augment import RESAMPLING, Box, pixels_of
from paceline.data.decode import library as module
from paceline.data.decode.library import RegionLibrary, address
from paceline.data.image import decode
from paceline.data.settings import INTERPOLATIONS

DONE, NOT_OURS, BAD_ARGUMENT = 0, 1, 4
FLIPPED = Image.Transpose.FLIP_LEFT_RIGHT


def noise(width: int, height: int, bands: int, seed: int = 0) -> np.ndarray:
    pixels = small.noise(width, height, seed, bands)
    pixels.setflags(write=False)  # as a cache keeps them
    return pixels


def by_pillow(pixels: np.ndarray, box: Box, flip: bool, name: str, size: int, channels: int):
    square = decode(pixels, channels).resize((size, size), RESAMPLING[name], box)
    return pixels_of(square.transpose(FLIPPED) if flip else square)


def check(
    library: RegionLibrary, pixels: np.ndarray, box: Box, flip: bool, name: str, size: int,
    channels: int,
) -> None:  # fmt: skip
    out = np.full((size, size, channels), 7, dtype=np.uint8)
    said = (pixels.shape, box, flip, name, size, channels)
    assert library.square(pixels, box, flip, name, out), said
    want = by_pillow(pixels, box, flip, name, size, channels)
    assert np.array_equal(out, want), said


def random_box(generator: np.random.Generator, width: int, height: int) -> Box:
    """Returns a box with fractional edges, at least a tenth of a pixel wide."""
    left, top, across, down = generator.random(4)
    left, top = left * (width - 0.1), top * (height - 0.1)
    right, bottom = left + 0.1 + across * (width - left), top + 0.1 + down * (height - top)
    return left, top, min(right, width), min(bottom, height)


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_random_boxes(library: RegionLibrary, bands: int, channels: int) -> None:
    generator = np.random.default_rng(channels + 10 * bands)
    for number in range(400):
        width, height = (int(side) for side in generator.integers(1, (9, 150)[number % 2], 2))
        # Of tall ones Pillow 13 takes rows first; of strips Pillow 12 has a way of its own.
        height = min(height * (4 if number % 5 == 0 else 1), 100 * width)
        name, flip = INTERPOLATIONS[number % 4], number // 4 % 2 == 1
        box = random_box(generator, width, height)
        size = int(generator.integers(1, 70))
        check(library, noise(width, height, bands, number), box, flip, name, size, channels)


@pytest.mark.parametrize("bands", [1, 3])
def test_boxes_at_the_edges(library: RegionLibrary, bands: int) -> None:
    """Boxes touch the edges, are the whole image, one pixel, or have the size of the result."""
    pixels, number = noise(11, 13, bands), 0
    for left, right in ((0, 11), (0, 1), (10, 11), (0, 6.5), (4.5, 11), (3, 8)):
        for top, bottom in ((0, 13), (0, 1), (12, 13), (0, 6.5), (7.5, 13), (4, 9)):
            for size in (1, 5, 11, 13, 40):
                name, number = INTERPOLATIONS[number % 4], number + 1
                check(library, pixels, (left, top, right, bottom), number % 3 == 0, name, size, 3)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("bands", [1, 3])
def test_either_order_of_the_passes(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch, rows_first: bool, bands: int
) -> None:
    """Whichever this Pillow takes: one side at a time it has no choice."""
    monkeypatch.setattr(module, "down_first", lambda *_: rows_first)
    generator, differ = np.random.default_rng(2), 0
    for number in range(60):
        width, height, size = (int(side) for side in generator.integers(20, 90, 3))
        pixels, name = noise(width, height, bands, number), INTERPOLATIONS[1 + number % 3]
        left, top, right, bottom = random_box(generator, width, height)
        passes: list[tuple[tuple[int, int], Box]] = [
            ((size, height), (left, 0, right, height)), ((size, size), (0, top, size, bottom)),
        ]  # fmt: skip
        if rows_first:
            passes = [
                ((width, size), (0, top, width, bottom)),
                ((size, size), (left, 0, right, size)),
            ]
        image = decode(pixels, 3)
        for sides, box in passes:
            image = image.resize(sides, RESAMPLING[name], box)
        out = np.zeros((size, size, 3), dtype=np.uint8)
        assert library.square(pixels, (left, top, right, bottom), False, name, out)
        assert np.array_equal(out, pixels_of(image)), (pixels.shape, name, size)
        monkeypatch.setattr(module, "down_first", lambda *_: not rows_first)
        other = np.zeros_like(out)
        assert library.square(pixels, (left, top, right, bottom), False, name, other)
        monkeypatch.setattr(module, "down_first", lambda *_: rows_first)
        differ += not np.array_equal(out, other)
    assert differ > 30


@pytest.mark.parametrize(
    "odd",
    [
        lambda: noise(20, 10, 3)[:, ::2],
        lambda: noise(20, 10, 3)[:, :, ::-1],
        lambda: np.asfortranarray(noise(20, 10, 3)),
        lambda: noise(20, 10, 3).astype(np.uint16),
        lambda: noise(20, 10, 1)[:, :, 0],
        lambda: noise(20, 10, 2),
        lambda: noise(20, 10, 4),
        lambda: noise(2, 201, 3),  # Pillow 12 resizes such strips in its own way
        lambda: np.zeros((1, 65_501, 1), dtype=np.uint8),
        lambda: np.zeros((0, 20, 3), dtype=np.uint8),
        lambda: np.zeros((10, 0, 3), dtype=np.uint8),
    ],
)
def test_arrays_that_are_not_taken(library: RegionLibrary, odd: Callable[[], np.ndarray]) -> None:
    out = np.zeros((8, 8, 3), dtype=np.uint8)
    assert not library.square(odd(), (0, 0, 1, 1), False, "bilinear", out)
    assert not out.any()


@pytest.mark.parametrize(
    "box",
    [(0, 0, 21, 10), (-1, 0, 20, 10), (5, 0, 5, 10), (9, 0, 5, 10), (0, float("nan"), 20, 10)],
)
def test_boxes_outside_of_the_image(library: RegionLibrary, box: Box) -> None:
    out = np.zeros((8, 8, 3), dtype=np.uint8)
    assert not library.square(noise(20, 10, 3), box, False, "bilinear", out)


@pytest.mark.parametrize(
    "out",
    [np.zeros((8, 9, 3), np.uint8), np.zeros((8, 16, 3), np.uint8)[:, ::2], noise(8, 8, 3)],
)
def test_places_that_cannot_be_filled(library: RegionLibrary, out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous, writable square"):
        library.square(noise(20, 10, 3), (0, 0, 20, 10), False, "bilinear", out)


def test_every_argument_is_checked(library: RegionLibrary) -> None:
    pixels, out = noise(20, 10, 3), np.zeros((8, 8, 3), dtype=np.uint8)
    good: dict[str, float] = {
        "self": library._decoder(), "pixels": address(pixels), "width": 20, "height": 10, "bands": 3,
        "left": 0, "top": 0, "right": 20, "bottom": 10, "flip": 0, "size": 8, "filter": 1,
        "down_first": 0, "channels": 3, "out": address(out),
    }  # fmt: skip

    def outcome(**changes: float | None) -> int:
        return int(library._library.region_square_of_pixels(*{**good, **changes}.values()))

    assert outcome() == DONE
    for name, values in {
        "self": [None], "pixels": [None], "out": [None], "width": [0, -1], "height": [0, -1],
        "bands": [0, 2, 4], "channels": [0, 2, 4], "size": [0, -1, 65_501], "filter": [-1, 4],
        "right": [20.5], "bottom": [0],
    }.items():  # fmt: skip
        for value in values:
            assert outcome(**{name: value}) == BAD_ARGUMENT, (name, value)
    assert outcome(width=65_501) == outcome(height=65_501) == NOT_OURS
    assert outcome(width=30_000, height=30_000) == NOT_OURS


def test_arrays_of_more_bytes_than_a_whole_number_of_c_are_not_taken(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, out = noise(10, 10, 3), np.zeros((4, 4, 3), np.uint8)
    monkeypatch.setattr(module, "_MOST_BYTES", pixels.nbytes)
    assert library.square(pixels, (0, 0, 10, 10), False, "bilinear", out)
    monkeypatch.setattr(module, "_MOST_BYTES", pixels.nbytes - 1)
    assert not library.square(pixels, (0, 0, 10, 10), False, "bilinear", out)


# --- the order of the passes -------------------------------------------------------------------
