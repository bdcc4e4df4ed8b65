"""Augmentation of whole batches on the device.

The host sends the random choices for a batch to the device as a few integers per sample. The pixels
stay on the device. The resulting pixels equal the pixels from the host's transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.augment import (
    CROP_RATIO,
    FIRST_TRY,
    FLIP,
    LEFT,
    TOP,
    TRIES,
    central_box,
    draws,
)
from paceline.data.decode.library import down_first
from paceline.data.order import Int64
from paceline.data.settings import DataSettings

Float64 = npt.NDArray[np.float64]
Filter = Callable[[torch.Tensor], torch.Tensor]
_ONE = 2.0**22
# Larger than every pixel index. Twice this value still fits into 64 bits.
_OUTSIDE = 2**40
# Maximum size of one intermediate tensor. A few such tensors exist at a time.
_CHUNK_BYTES = 128 * 2**20


class AugmentNumbers:
    """Converts random numbers to the integers that describe each sample's augmentation, on the host.

    The `draws` random numbers of a sample become `count` integers. These are (flip, down, right)
    for a shifted crop, or (flip, left, top, right, bottom) for a box. With cutout, the top and left
    of the blanked square follow. `TrainTransform` makes the same choices.
    """

    def __init__(self, settings: DataSettings, height: int, width: int) -> None:
        """Creates a converter for stored images of `height` × `width` pixels."""
        self._settings = settings
        self._sides = height, width
        self._boxes = settings.augment == "random_resized_crop"
        self.draws = draws(settings)
        self.count = (5 if self._boxes else 3) + (2 if settings.cutout else 0)

    def fill(self, rows: Float64, out: Int64) -> None:
        """Converts `rows` (samples × `draws`) and writes the integers to `out` (`count` × samples)."""
        settings = self._settings
        out[0] = (rows[:, FLIP] < 0.5) & settings.flip
        if side := settings.cutout:
            out[-2:] = (rows[:, -2:].T * settings.image_size).astype(np.int64) - side // 2
        if self._boxes:
            height, width = self._sides
            out[1:5] = random_boxes(width, height, rows, settings.crop_scale, CROP_RATIO)
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
    """Computes `random_box` for many samples at once.

    Args:
        width: Width of the images.
        height: Height of the images.
        rows: Random numbers, samples × draws.
        scale: Range of the area, as fractions of the image's area.
        ratio: Range of the aspect ratio.

    Returns:
        An array with the rows left, top, right and bottom, and one column per sample.
    """
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


class DeviceAugment:
    """Augments a batch of a resident set as `TrainTransform` does. Does not synchronize."""

    def __init__(
        self, pixels: torch.Tensor, shape: tuple[int, int, int], settings: DataSettings
    ) -> None:
        """Creates the augmentation of a `ResidentSet` with these `pixels` and this `shape`."""
        self._pixels = pixels
        self._images = pixels[:-1].view(-1, *shape)
        self._size = settings.image_size
        self._interpolation = settings.interpolation
        self._cutout = settings.cutout
        boxes = settings.augment == "random_resized_crop"
        self._apply = self._resized if boxes else self._shifted
        height, width, channels = shape
        # With boxes, one float64 per stored value; else one 64-bit index per pixel.
        sample_bytes = 8 * height * width * (channels if boxes else 1)
        self._chunk = max(1, _CHUNK_BYTES // sample_bytes)
        self._sides = torch.arange(self._size, device=pixels.device)

    def __call__(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the augmented images of the samples `indices`.

        `numbers` are the integers of `AugmentNumbers`, one column per sample.
        """
        parts = [
            self._apply(
                indices[start : start + self._chunk], numbers[:, start : start + self._chunk]
            )
            for start in range(0, len(indices), self._chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _resized(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        flip, *box = numbers[:5]
        images = self._images.index_select(0, indices)
        squares: torch.Tensor = resample(images, box, flip, self._size, self._interpolation)
        if self._cutout:
            squares.masked_fill_(self._cutout_mask(numbers)[..., None], 0)
        return squares

    def _shifted(self, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Flips and shifts images by gathering pixels.

        The index of a pixel is the index of the first pixel in the same line, plus the column.
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
        """Returns a mask, samples × height × width, that is True inside the cutout."""
        away = self._sides - numbers[-2:, :, None]
        rows, columns = ((away >= 0) & (away < self._cutout)).unbind()
        mask: torch.Tensor = rows[:, :, None] & columns[:, None, :]
        return mask

    def _inside(self, place: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return torch.where((place >= 0) & (place < self._size), number, _OUTSIDE)


def resample(
    images: torch.Tensor,
    box: Sequence[torch.Tensor],
    flip: torch.Tensor,
    size: int,
    interpolation: str,
) -> torch.Tensor:
    """Resamples a box of each image to a square, with exactly the pixels of Pillow.

    The interpolation filter yields one weight matrix for the lines and one for the columns of an
    image. Resampling multiplies the image by both matrices. As in Pillow, weights are integer
    multiples of 2⁻²², and pixel values are rounded after each product. float64 represents every sum
    exactly, so the order of additions does not matter.

    Args:
        images: Samples × height × width × channels, uint8.
        box: Four tensors with left, top, right and bottom of each sample, in pixels.
        flip: 1 for each sample whose square is flipped horizontally, else 0.
        size: Side of the squares in pixels.
        interpolation: Name of the filter.
    """
    height, width = images.shape[1:3]
    left, top, right, bottom = box
    # The products must stay in float64 if the caller uses autocast.
    with torch.autocast(images.device.type, enabled=False):
        across = _weights(left, right, width, size, interpolation)
        across = torch.where(flip[:, None, None] > 0, across.flip(1), across)
        down = _weights(top, bottom, height, size, interpolation)
        levels = images.to(torch.float64)
        if down_first(width, height, size):
            levels = _along_rows(across, _along_columns(down, levels))
        else:
            levels = _along_columns(down, _along_rows(across, levels))
    return levels.to(torch.uint8).contiguous()


def _along_rows(weights: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return _along_columns(weights, levels.transpose(1, 2)).transpose(1, 2)


def _along_columns(weights: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    samples, stored, other, channels = levels.shape
    sums = torch.bmm(weights, levels.reshape(samples, stored, -1))
    return _levels(sums).view(samples, -1, other, channels)


def _levels(sums: torch.Tensor) -> torch.Tensor:
    """Divides sums by 2²², rounds them half up, and clamps them to 0 to 255."""
    return sums.add_(_ONE / 2).div_(_ONE).floor_().clamp_(0, 255)


def _weights(
    low: torch.Tensor, high: torch.Tensor, stored: int, size: int, interpolation: str
) -> torch.Tensor:
    """Returns the weights of stored pixels in result pixels, times 2²², as samples × size × stored.

    As in Pillow, stored pixels outside of the box have a weight if the filter extends to them.

    Args:
        low: First edge of each sample's box along one axis.
        high: Second edge of each sample's box along that axis.
        stored: Number of stored pixels along the axis.
        size: Number of result pixels along the axis.
        interpolation: Name of the filter.
    """
    scale = (high - low).to(torch.float64)[:, None] / size
    pixel = torch.arange(stored, device=low.device, dtype=torch.float64)
    if interpolation == "nearest":
        return (pixel == _nearest(low[:, None] + scale * 0.5, scale, size)).to(torch.float64) * _ONE
    centre = low[:, None] + (torch.arange(size, device=low.device) + 0.5) * scale
    # When an image shrinks, the filter is widened so that every stored pixel has a weight.
    narrowing = 1 / scale.clamp_min(1)[:, :, None]
    weights = _FILTERS[interpolation]((pixel - centre[:, :, None] + 0.5) * narrowing)
    weights = weights / weights.sum(dim=2, keepdim=True) * _ONE
    return (weights + torch.where(weights < 0, -0.5, 0.5)).trunc_()


def _nearest(start: torch.Tensor, step: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the index of the stored pixel at the center of each result pixel.

    Pillow computes centers by repeated addition. Rounding errors decide on which side of a pixel
    boundary a center lies, so this function makes the same additions in the same order.
    """
    centres = [start]
    for _ in range(size - 1):
        centres.append(centres[-1] + step)
    return torch.stack(centres, dim=1).floor_()


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Returns the values of the cubic filter of Keys with a = −1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    """Returns the values of the Lanczos filter with three lobes."""
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


_FILTERS: dict[str, Filter] = {
    "bilinear": _triangle,
    "bicubic": _cubic,
    "lanczos": _lanczos,
}
