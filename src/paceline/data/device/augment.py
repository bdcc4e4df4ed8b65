"""Augmentation of whole batches on the device.

The host sends the random choices for a batch to the device as a few integers per sample. The pixels
stay on the device. The resulting pixels equal the pixels from the host's transforms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.augment import FLIP, LEFT, TOP, draws
from paceline.data.order import Int64
from paceline.data.settings import DataSettings

Float64 = npt.NDArray[np.float64]
# Larger than every pixel index. Twice this value still fits into 64 bits.
_OUTSIDE = 2**40
# Maximum size of one intermediate tensor. A few such tensors exist at a time.
_CHUNK_BYTES = 128 * 2**20
_INDEX_BYTES = 8


class AugmentNumbers:
    """Converts random numbers to the integers that describe each sample's augmentation, on the host.

    The `draws` random numbers of a sample become `count` integers: 1 to flip, and the shift down
    and right in pixels. With cutout, the top and left edge of the blanked square follow.
    `TrainTransform` makes the same choices.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self.draws = draws(settings)
        self.count = 3 + (2 if settings.cutout else 0)

    def fill(self, rows: Float64, out: Int64) -> None:
        """Converts `rows` (samples × `draws`) and writes the integers to `out` (`count` × samples)."""
        settings = self._settings
        out[0] = (rows[:, FLIP] < 0.5) & settings.flip
        if side := settings.cutout:
            out[-2:] = (rows[:, -2:].T * settings.image_size).astype(np.int64) - side // 2
        padding = settings.crop_padding if settings.augment == "pad_crop" else 0
        for row, column in ((1, TOP), (2, LEFT)):
            out[row] = padding - (rows[:, column] * (2 * padding + 1)).astype(np.int64)


class DeviceAugment:
    """Augments images that are stored on the GPU, with the same result as `TrainTransform`.

    Calls do not synchronize with the device.
    """

    def __init__(self, pixels: torch.Tensor, settings: DataSettings) -> None:
        """Creates the augmentation of images with the memory layout of `ResidentSet.pixels`."""
        self._pixels = pixels
        self._size = settings.image_size
        self._cutout = settings.cutout
        self._chunk = max(1, _CHUNK_BYTES // (_INDEX_BYTES * self._size**2))
        self._sides = torch.arange(self._size, device=pixels.device)

    def __call__(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the augmented images of the samples `indices`.

        `numbers` are the integers of `AugmentNumbers`, one column per sample.
        """
        parts = [
            self._shifted(
                indices[start : start + self._chunk], numbers[:, start : start + self._chunk]
            )
            for start in range(0, len(indices), self._chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shifted(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Flips and shifts images by gathering pixels.

        A pixel's index is the index of the first pixel in its line, plus the column.
        """
        size = self._size
        flip, down, right = numbers[:3, :, None]
        line = self._sides - down
        column = torch.where(flip > 0, size - 1 - self._sides, self._sides) - right
        start = (indices[:, None] * size + line) * size
        start, column = self._inside(line, start), self._inside(column, column)
        source = start[:, :, None] + column[:, None, :]
        if self._cutout:
            source.masked_fill_(self._cutout_mask(numbers), _OUTSIDE)
        # Indices outside of the image or in the cutout become the index of the black pixel at the end.
        source.clamp_max_(len(self._pixels) - 1)
        return self._pixels.index_select(0, source.view(-1)).view(len(indices), size, size, -1)

    def _cutout_mask(self, numbers: torch.Tensor) -> torch.Tensor:
        away = self._sides - numbers[-2:, :, None]
        rows, columns = ((away >= 0) & (away < self._cutout)).unbind()
        mask: torch.Tensor = rows[:, :, None] & columns[:, None, :]
        return mask

    def _inside(self, place: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return torch.where((place >= 0) & (place < self._size), number, _OUTSIDE)
