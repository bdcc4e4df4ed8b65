"""`AugmentNumbers`: a batch's augmentation as whole numbers, drawn on the host.

In: rows of uniform numbers, the very ones that `TrainTransform` takes. Out: what it would do with each
image, as a few whole numbers: flip and shift, or flip and box, and the corner of the hole. They travel
to the device, the pixels stay there.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.data.augmentation.augment import FIRST_TRY, FLIP, LEFT, TOP, TRIES, central_box, draws
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings

Float64 = npt.NDArray[np.float64]


class AugmentNumbers:
    """`draws` uniform numbers a sample become `count` whole ones: flip, down, right, or flip, left,
    top, right, bottom; then, with `cutout`, top and left of the hole."""

    def __init__(self, settings: DataSettings, height: int, width: int) -> None:
        """`height` and `width` are those of the stored images."""
        self._settings = settings
        self._sides = height, width
        self._boxes = settings.augment == "random_resized_crop"
        self.draws = draws(settings)
        self.count = (5 if self._boxes else 3) + (2 if settings.cutout else 0)

    def fill(self, rows: Float64, out: Int64) -> None:
        """`out` is `count` × samples."""
        settings = self._settings
        out[0] = (rows[:, FLIP] < 0.5) & settings.flip
        if side := settings.cutout:
            out[-2:] = (rows[:, -2:].T * settings.image_size).astype(np.int64) - side // 2
        if self._boxes:
            height, width = self._sides
            out[1:5] = random_boxes(width, height, rows, settings.crop_scale, settings.crop_ratio)
            return
        padding = settings.crop_padding if settings.augment == "pad_crop" else 0
        for row, column in ((1, TOP), (2, LEFT)):
            out[row] = padding - (rows[:, column] * (2 * padding + 1)).astype(np.int64)


def random_boxes(
    width: int,
    height: int,
    rows: Float64,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Int64:
    """`random_box` for all rows at once: left, top, right, bottom, each a row of the result."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    tries = rows[:, FIRST_TRY : FIRST_TRY + 2 * TRIES].reshape(-1, TRIES, 2)
    area = width * height * (scale[0] + tries[:, :, 0] * (scale[1] - scale[0]))
    aspect = np.exp(low + tries[:, :, 1] * (high - low))
    w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = (np.arange(len(rows)), fits.argmax(axis=1))
    w, h = w[first].astype(np.int64), h[first].astype(np.int64)
    left = (rows[:, LEFT] * (width - w + 1)).astype(np.int64)
    top = (rows[:, TOP] * (height - h + 1)).astype(np.int64)
    boxes = np.stack([left, top, left + w, top + h])
    boxes[:, ~fits.any(axis=1)] = np.array(central_box(width, height, ratio))[:, None]
    return boxes
