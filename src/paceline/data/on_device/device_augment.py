"""`DeviceAugment`: `TrainTransform` for a whole batch, where the pixels already are.

In: a resident set, sample indices, and the whole numbers of `AugmentNumbers`. Out: samples × height ×
width × channels in uint8 on the device, the same pixels as on the host. Nothing waits for the device.
"""

from __future__ import annotations

import torch

from paceline.data.on_device.device_resample import resample
from paceline.data.on_device.resident_set import ResidentSet
from paceline.data.settings import DataSettings

# Beyond every pixel number, and the sum of two of them still within 64 bits.
_OUTSIDE = 2**40
# Bytes of intermediate values, of which a few exist at a time: bounds the memory they take.
_CHUNK_BYTES = 128 * 2**20


class DeviceAugment:
    """Only queues kernels; the set is read, never written to."""

    def __init__(self, held: ResidentSet, settings: DataSettings) -> None:
        self._held = held
        self._size = settings.image_size
        self._interpolation = settings.interpolation
        self._cutout = settings.cutout
        boxes = settings.augment == "random_resized_crop"
        self._apply = self._resized if boxes else self._shifted
        height, width, channels = held.shape
        # A float64 for each stored value, or the number of each pixel in 64 bits.
        sample_bytes = 8 * height * width * (channels if boxes else 1)
        self._chunk = max(1, _CHUNK_BYTES // sample_bytes)
        self._sides = torch.arange(self._size, device=held.device)

    def __call__(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers` has a row for each number and a column for each sample."""
        parts = [
            self._apply(
                indices[start : start + self._chunk], numbers[:, start : start + self._chunk]
            )
            for start in range(0, len(indices), self._chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _resized(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        flip, *box = numbers[:5]
        images = self._held.images.index_select(0, indices)
        found: torch.Tensor = resample(images, box, flip, self._size, self._interpolation)
        return found.masked_fill_(self._hole(numbers)[..., None], 0) if self._cutout else found

    def _shifted(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """One gather of whole pixels: each comes from the number of its line plus its column."""
        size = self._size
        flip, down, right = numbers[:3, :, None]
        line = self._sides - down
        column = torch.where(flip > 0, size - 1 - self._sides, self._sides) - right
        start = (indices[:, None] * size + line) * size
        start, column = self._inside(line, start), self._inside(column, column)
        source = start[:, :, None] + column[:, None, :]
        if self._cutout:
            source.masked_fill_(self._hole(numbers), _OUTSIDE)
        # What lies outside on either side, or in the hole, ends at the black pixel after the last.
        source.clamp_max_(len(self._held.pixels) - 1)
        found = self._held.pixels.index_select(0, source.view(-1))
        return found.view(len(indices), size, size, -1)

    def _hole(self, numbers: torch.Tensor) -> torch.Tensor:
        """Samples × height × width: where the hole is."""
        away = self._sides - numbers[-2:, :, None]
        rows, columns = ((away >= 0) & (away < self._cutout)).unbind()
        hole: torch.Tensor = rows[:, :, None] & columns[:, None, :]
        return hole

    def _inside(self, place: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return torch.where((place >= 0) & (place < self._size), number, _OUTSIDE)
