"""Transforms that convert a decoded image to the square of pixels that the model takes.

A transform takes a PIL image, the random numbers of the sample (training only) and the output array
(height × width × channels, uint8). A transform has no other source of randomness, so the same
numbers give the same pixels in every thread.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from paceline.data.settings import MOST_MAGNITUDE, DataSettings

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]
TRIES = 10
# Smallest and largest aspect ratio of a random resized crop.
CROP_RATIO = (3 / 4, 4 / 3)
# Positions in a row of random numbers. Each try of a random box takes two numbers.
FLIP, TOP, LEFT, FIRST_TRY = 0, 1, 2, 3
Change = Callable[[Image.Image, float], Image.Image]
_ORDERS = list(itertools.permutations(range(4)))
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class SquareTransform(ABC):
    """Base class of transforms that crop an image and resample the crop to a square.

    Calling the transform runs all steps on a decoded image. A decoder that decodes only the crop
    calls the methods `box`, `flips` and `finish` one by one. Their argument `row` is the random
    numbers of the sample, from 0 to 1.

    Attributes:
        size: Side of the square in pixels.
        draws: How many random numbers the transform needs per sample.
    """

    draws: int

    def __init__(self, size: int, interpolation: str) -> None:
        self.size = size
        self.interpolation = interpolation
        self._resampling = RESAMPLING[interpolation]

    @abstractmethod
    def box(self, width: int, height: int, row: Sequence[float]) -> Box:
        """Returns the crop of a `width` × `height` image: left, top, right and bottom in pixels."""

    def flips(self, row: Sequence[float]) -> bool:
        """Returns True if the cropped and resampled image is flipped horizontally."""
        return False

    def finish(self, row: Sequence[float], out: Pixels) -> None:  # noqa: B027  (optional step)
        """Applies the remaining changes, such as color jitter and cutout, to `out` in place."""

    def is_square(self, width: int, height: int, row: Sequence[float]) -> bool:
        """Returns True if the crop is the whole image and already has the output size."""
        square = (0, 0, self.size, self.size)
        return (width, height) == square[2:] and self.box(width, height, row) == square

    def __call__(self, image: Image.Image, row: Sequence[float], out: Pixels) -> None:
        if not self.is_square(image.width, image.height, row):
            box = self.box(image.width, image.height, row)
            image = image.resize((self.size, self.size), self._resampling, box)
        # Pillow flips four-byte pixels ten times as fast as NumPy flips three-byte pixels.
        if self.flips(row):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        out[...] = pixels_of(image)
        self.finish(row, out)


class TrainTransform(SquareTransform):
    """Crops and flips at random, then applies color jitter, RandAugment and cutout if enabled."""

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
        """Returns True if the image is flipped before `finish`; with `pad_crop`, `finish` flips it."""
        return self._settings.augment != "pad_crop" and self._wants_flip(row)

    def _wants_flip(self, row: Sequence[float]) -> bool:
        return self._settings.flip and row[FLIP] < 0.5

    def finish(self, row: Sequence[float], out: Pixels) -> None:
        settings = self._settings
        if settings.augment == "pad_crop":
            crop = _padded_crop(out, row, settings.crop_padding)
            out[...] = crop[:, ::-1] if self._wants_flip(row) else crop
        if extras := extra_draws(settings):
            first = first_extra(settings)
            apply_extras(settings, row[first : first + extras], out)
        if side := settings.cutout:
            top, left = (int(number * self.size) - side // 2 for number in row[-2:])
            out[max(top, 0) : top + side, max(left, 0) : left + side] = 0


class FitTransform(SquareTransform):
    """Resizes the short side to `short_side` and crops the central square of `size`."""

    draws = 0

    def __init__(self, size: int, short_side: int, interpolation: str) -> None:
        super().__init__(size, interpolation)
        self._short_side = short_side

    def box(self, width: int, height: int, row: Sequence[float]) -> Box:
        return fitted_box(width, height, self._short_side, self.size)


class EvalTransform(FitTransform):
    """The evaluation transform: `FitTransform` with `data.eval_resize` as short side.

    If `data.eval_resize` is 0, the short side is `data.image_size`.
    """

    def __init__(self, settings: DataSettings) -> None:
        size = settings.image_size
        super().__init__(size, settings.eval_resize or size, settings.interpolation)


def draws(settings: DataSettings) -> int:
    """Returns how many random numbers a training sample needs; cutout uses the last ones."""
    return first_extra(settings) + extra_draws(settings) + (2 if settings.cutout else 0)


def first_extra(settings: DataSettings) -> int:
    """Returns the position of the first random number for color jitter or RandAugment."""
    return FIRST_TRY + (2 * TRIES if settings.augment == "random_resized_crop" else 0)


def random_box(
    width: int,
    height: int,
    row: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """Returns a box of random area and aspect ratio (Szegedy et al. 2014): left, top, right, bottom.

    Tries up to ten boxes. If none fits into the image, returns the largest central box whose
    aspect ratio is in the range.

    Args:
        width: Width of the image.
        height: Height of the image.
        row: Random numbers of the sample.
        scale: Range of the area, as fractions of the image's area.
        ratio: Range of the aspect ratio. Its logarithm is uniformly distributed.
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
    """Returns the largest box at the center of the image whose aspect ratio is in the range `ratio`."""
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def fitted_box(width: int, height: int, short_side: int, size: int) -> Box:
    """Returns the box of the image that a resize and center crop keep.

    The resize scales the short side to `short_side`; the crop is `size` × `size`. Resampling only
    this box gives the same pixels as resizing the whole image and cropping the result.
    """
    shorter = min(width, height)
    scaled = (short_side * width // shorter, short_side * height // shorter)
    left, top = (round((side - size) / 2) for side in scaled)
    x, y = width / scaled[0], height / scaled[1]
    # Rounding may place the corner beyond the edge of the image. Pillow rejects such boxes.
    right, bottom = min((left + size) * x, width), min((top + size) * y, height)
    return left * x, top * y, right, bottom


def _padded_crop(pixels: Pixels, row: Sequence[float], padding: int) -> Pixels:
    """Pads an image with zeros on all sides, and returns a random crop of the original size."""
    size, _, channels = pixels.shape
    padded = np.zeros((size + 2 * padding, size + 2 * padding, channels), dtype=np.uint8)
    padded[padding : padding + size, padding : padding + size] = pixels
    top, left = (int(row[place] * (2 * padding + 1)) for place in (TOP, LEFT))
    return padded[top : top + size, left : left + size]


def pixels_of(image: Image.Image) -> Pixels:
    """Returns the pixels of an image as height × width × channels, with one channel for grayscale."""
    pixels: Pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def extra_draws(settings: DataSettings) -> int:
    """Returns how many random numbers color jitter and RandAugment use; 0 if both are disabled."""
    jitter = 5 if any(settings.color_jitter) else 0
    return jitter + 2 * settings.randaugment[0]


def apply_extras(settings: DataSettings, numbers: Sequence[float], out: Pixels) -> None:
    """Applies color jitter and RandAugment to `out` in place.

    Args:
        settings: Settings with `color_jitter` and `randaugment`.
        numbers: `extra_draws(settings)` random numbers in [0, 1).
        out: Pixels as height × width × channels.
    """
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
    """Changes brightness, contrast, saturation and hue by random amounts, in random order."""
    for which in _ORDERS[int(numbers[4] * len(_ORDERS))]:
        strength, number = strengths[which], numbers[which]
        if not strength:
            continue
        if which == 3:
            image = _rotated_hue(image, strength * (2 * number - 1))
        else:
            low = max(0.0, 1 - strength)
            image = _ENHANCERS[which](image).enhance(low + number * (1 + strength - low))
    return image


def _rotated_hue(image: Image.Image, turn: float) -> Image.Image:
    """Rotates the hue by `turn` full circles. Leaves grayscale images unchanged."""
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
    """Applies an affine transform to the image; `matrix` maps output to input positions.

    Positions outside of the image give black.
    """
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Change:
    """Returns a RandAugment operation that scales, for example, contrast by 1 + 0.9 · s, |s| ≤ 1."""
    return lambda image, s: kind(image).enhance(1 + 0.9 * s)


_OPERATIONS: tuple[Change, ...] = (
    lambda image, _: image,
    # Shear along x and y, then translate along x and y.
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
