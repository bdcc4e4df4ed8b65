"""Augmentation: from a decoded image to the square of pixels that the model takes.

A transform takes a PIL image, a row of uniform numbers (training only) and the place to write to:
height × width × channels in uint8. All randomness is in the row, so the same row gives the same
pixels in any thread.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from paceline.data.settings import MOST_MAGNITUDE, DataSettings

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]
# Where in a row of uniform numbers each choice lies; a try of a box takes two.
TRIES = 10
# Smallest and largest aspect ratio of a random resized crop.
CROP_RATIO = (3 / 4, 4 / 3)
FLIP, TOP, LEFT, FIRST_TRY = 0, 1, 2, 3
Change = Callable[[Image.Image, float], Image.Image]
_ORDERS = list(itertools.permutations(range(4)))
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class Transform(Protocol):
    """`size` is the side of the square; `draws` is the length of the row of uniform numbers that a
    call takes."""

    size: int
    draws: int

    def __call__(self, image: Image.Image, row: Sequence[float], out: Pixels) -> None: ...


class SquareTransform(ABC):
    """A transform in three steps: a box of the image is resampled to a square, turned about or not,
    and finished in place. Whoever can decode a box alone takes the steps one by one."""

    draws: int

    def __init__(self, size: int, interpolation: str) -> None:
        self.size = size
        self.interpolation = interpolation
        self._resampling = RESAMPLING[interpolation]

    @abstractmethod
    def box(self, width: int, height: int, row: Sequence[float]) -> Box:
        """What becomes the square, of an image of this size."""

    def flips(self, row: Sequence[float]) -> bool:
        return False

    def finish(self, row: Sequence[float], out: Pixels) -> None:  # noqa: B027  (most do nothing)
        """What is done to the square itself."""

    def is_square(self, width: int, height: int, row: Sequence[float]) -> bool:
        """Whether the whole image is the square, with nothing to resample."""
        square = (0, 0, self.size, self.size)
        return (width, height) == square[2:] and self.box(width, height, row) == square

    def __call__(self, image: Image.Image, row: Sequence[float], out: Pixels) -> None:
        if not self.is_square(image.width, image.height, row):
            box = self.box(image.width, image.height, row)
            image = image.resize((self.size, self.size), self._resampling, box)
        # Pillow turns four-byte pixels about, ten times as fast as NumPy does three bytes.
        turned = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flips(row) else image
        out[...] = pixels_of(turned)
        self.finish(row, out)


class TrainTransform(SquareTransform):
    """Random resized crop, or padding and a random crop, or neither; a random flip; extras, where
    they are asked for; a random cutout."""

    def __init__(self, settings: DataSettings) -> None:
        super().__init__(settings.image_size, settings.interpolation)
        self._settings = settings
        self.draws = draws(settings)

    def box(self, width: int, height: int, row: Sequence[float]) -> Box:
        settings = self._settings
        if settings.augment == "random_resized_crop":
            return random_box(width, height, row, settings.crop_scale, CROP_RATIO)
        return fitted_box(width, height, self.size, self.size)

    def flips(self, row: Sequence[float]) -> bool:
        """Padding first, where there is any: then `finish` turns about what it shifted."""
        return self._settings.augment != "pad_crop" and self._wants_flip(row)

    def _wants_flip(self, row: Sequence[float]) -> bool:
        return self._settings.flip and row[FLIP] < 0.5

    def finish(self, row: Sequence[float], out: Pixels) -> None:
        if self._settings.augment == "pad_crop":
            target = out[:, ::-1] if self._wants_flip(row) else out
            _shift_into(target, out.copy(), row, self._settings.crop_padding)
        if extras := extra_draws(self._settings):
            first = first_extra(self._settings)
            apply_extras(self._settings, row[first : first + extras], out)
        if side := self._settings.cutout:
            top, left = (int(number * self.size) - side // 2 for number in row[-2:])
            out[max(top, 0) : top + side, max(left, 0) : left + side] = 0


class FitTransform(SquareTransform):
    """Short side to `short_side`, then the square of `size` in the centre; no chance in it."""

    draws = 0

    def __init__(self, size: int, short_side: int, interpolation: str) -> None:
        super().__init__(size, interpolation)
        self._short_side = short_side

    def box(self, width: int, height: int, row: Sequence[float]) -> Box:
        return fitted_box(width, height, self._short_side, self.size)


class EvalTransform(FitTransform):
    """Short side to `eval_resize`, or straight to `image_size` where that is 0."""

    def __init__(self, settings: DataSettings) -> None:
        size = settings.image_size
        super().__init__(size, settings.eval_resize or size, settings.interpolation)


def draws(settings: DataSettings) -> int:
    """Uniform numbers that the augmentation of a training sample takes; those of the cutout come
    last."""
    return first_extra(settings) + extra_draws(settings) + (2 if settings.cutout else 0)


def first_extra(settings: DataSettings) -> int:
    """Where in the row the extras' numbers begin, if there are any."""
    return FIRST_TRY + (2 * TRIES if settings.augment == "random_resized_crop" else 0)


def random_box(
    width: int,
    height: int,
    row: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """A box of random area and aspect ratio (Szegedy et al. 2014), as left, top, right, bottom.

    Up to ten tries of an area in `scale` and a ratio, even in its logarithm, in `ratio`; should
    none fit, the largest centred box whose ratio is allowed.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for t in range(FIRST_TRY, FIRST_TRY + 2 * TRIES, 2):
        area = width * height * (scale[0] + row[t] * (scale[1] - scale[0]))
        aspect = math.exp(low + row[t + 1] * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(row[TOP] * (height - h + 1))
            left = int(row[LEFT] * (width - w + 1))
            return left, top, left + w, top + h
    return central_box(width, height, ratio)


def central_box(width: int, height: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """The largest box in the centre whose aspect ratio lies in `ratio`."""
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def fitted_box(width: int, height: int, short_side: int, size: int) -> Box:
    """The central `size` × `size` of the image scaled to `short_side`, traced back into the image.

    Resampling only this box gives the same pixels as scaling everything and cutting, without the
    strip that an image of extreme shape would become.
    """
    shorter = min(width, height)
    scaled = (short_side * width // shorter, short_side * height // shorter)
    left, top = (round((side - size) / 2) for side in scaled)
    x, y = width / scaled[0], height / scaled[1]
    # A product may land a rounding beyond the edge, which Pillow refuses.
    right, bottom = min((left + size) * x, width), min((top + size) * y, height)
    return left * x, top * y, right, bottom


def _shift_into(target: Pixels, pixels: Pixels, row: Sequence[float], padding: int) -> None:
    """A random crop of the image padded with zeros on all sides, without building the padding."""
    size = len(target)
    down = padding - int(row[TOP] * (2 * padding + 1))
    right = padding - int(row[LEFT] * (2 * padding + 1))
    target[...] = 0
    rows, columns = size - abs(down), size - abs(right)
    to_row, to_column = max(down, 0), max(right, 0)
    from_row, from_column = max(-down, 0), max(-right, 0)
    target[to_row : to_row + rows, to_column : to_column + columns] = pixels[
        from_row : from_row + rows, from_column : from_column + columns
    ]


def pixels_of(image: Image.Image) -> Pixels:
    """Always three axes: a greyscale image has one channel."""
    pixels: Pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def extra_draws(settings: DataSettings) -> int:
    """Uniform numbers that a sample takes for colour jitter and RandAugment, both off by default."""
    jitter = 5 if any(settings.color_jitter) else 0
    return jitter + 2 * settings.randaugment[0]


def apply_extras(settings: DataSettings, numbers: Sequence[float], out: Pixels) -> None:
    """`numbers` are as many as `extra_draws` says."""
    flat = out[:, :, 0] if out.shape[2] == 1 else out
    image = Image.fromarray(np.ascontiguousarray(flat))
    if any(settings.color_jitter):
        image = _jittered(image, settings.color_jitter, numbers[:5])
        numbers = numbers[5:]
    count, magnitude = settings.randaugment
    for place in range(count):
        image = _augmented(image, magnitude, *numbers[2 * place : 2 * place + 2])
    flat[...] = np.asarray(image)


def _jittered(
    image: Image.Image, strengths: tuple[float, ...], numbers: Sequence[float]
) -> Image.Image:
    """A strength s is a factor between 1 − s, at least 0, and 1 + s; for the hue a turn within ± s."""
    for which in _ORDERS[int(numbers[4] * len(_ORDERS))]:
        strength, number = strengths[which], numbers[which]
        if not strength:
            continue
        if which == 3:
            image = _turned_hue(image, strength * (2 * number - 1))
        else:
            low = max(0.0, 1 - strength)
            image = _ENHANCERS[which](image).enhance(low + number * (1 + strength - low))
    return image


def _turned_hue(image: Image.Image, turn: float) -> Image.Image:
    """By `turn` of the whole circle; grey has no hue."""
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int64) + round(turn * 255)) % 256
    bands = (Image.fromarray(turned.astype(np.uint8)), saturation, value)
    return Image.merge("HSV", bands).convert("RGB")


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def _augmented(image: Image.Image, magnitude: int, choice: float, sign: float) -> Image.Image:
    strength = magnitude / MOST_MAGNITUDE
    signed = -strength if sign < 0.5 else strength
    return _OPERATIONS[int(choice * len(_OPERATIONS))](image, signed)


def _moved(image: Image.Image, matrix: Sequence[float]) -> Image.Image:
    """Where each pixel comes from, by an affine map; black where that is outside."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Change:
    """Towards the original turned about, or away from it, by at most nine tenths."""
    return lambda image, s: kind(image).enhance(1 + 0.9 * s)


_OPERATIONS: tuple[Change, ...] = (
    lambda image, _: image,
    # Sheared along rows and columns, then shifted.
    lambda image, s: _moved(image, (1, 0.3 * s, -0.15 * s * image.height, 0, 1, 0)),
    lambda image, s: _moved(image, (1, 0, 0, 0.3 * s, 1, -0.15 * s * image.width)),
    lambda image, s: _moved(image, (1, 0, round(0.45 * s * image.width), 0, 1, 0)),
    lambda image, s: _moved(image, (1, 0, 0, 0, 1, round(0.45 * s * image.height))),
    lambda image, s: image.rotate(30 * s),
    _enhanced(ImageEnhance.Brightness),
    _enhanced(ImageEnhance.Color),
    _enhanced(ImageEnhance.Contrast),
    _enhanced(ImageEnhance.Sharpness),
    lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    lambda image, s: ImageOps.solarize(image, round(256 * (1 - abs(s)))),
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
)
