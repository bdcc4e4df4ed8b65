"""Augmentation beyond crop and flip: colour jitter and RandAugment, both off unless asked for.

In: the square that the crop made, and its numbers from the sample's row. Out: the square, changed in
place. All chance is in the numbers, so any thread gives the same sample of an epoch the same look.
Colour jitter multiplies brightness, contrast and saturation and turns the hue, in an order of chance;
RandAugment (Cubuk et al. 2019) applies a few operations of fourteen at one strength.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from paceline.data.settings import MOST_MAGNITUDE, DataSettings

Pixels = npt.NDArray[np.uint8]
Change = Callable[[Image.Image, float], Image.Image]
_ORDERS = list(itertools.permutations(range(4)))


def extra_draws(settings: DataSettings) -> int:
    """Uniform numbers that a sample takes for them."""
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


def _sheared_x(image: Image.Image, s: float) -> Image.Image:
    return _moved(image, (1, 0.3 * s, -0.15 * s * image.height, 0, 1, 0))


def _sheared_y(image: Image.Image, s: float) -> Image.Image:
    return _moved(image, (1, 0, 0, 0.3 * s, 1, -0.15 * s * image.width))


def _shifted_x(image: Image.Image, s: float) -> Image.Image:
    return _moved(image, (1, 0, round(0.45 * s * image.width), 0, 1, 0))


def _shifted_y(image: Image.Image, s: float) -> Image.Image:
    return _moved(image, (1, 0, 0, 0, 1, round(0.45 * s * image.height)))


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Change:
    """Towards the original turned about, or away from it, by at most nine tenths."""
    return lambda image, s: kind(image).enhance(1 + 0.9 * s)


_OPERATIONS: tuple[Change, ...] = (
    lambda image, _: image,
    _sheared_x,
    _sheared_y,
    _shifted_x,
    _shifted_y,
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
