"""Triton kernels that crop decoded images and resample the crops, and that normalize images.

`crop_kernel` reads a table with the address, box, flip and cutout of each decoded image. Images may
have any size. One launch fills samples × height × width × 3 in uint8. The filter is Pillow's
triangle, which widens when an image shrinks. As in Pillow, horizontal sums are rounded to pixel
values before the vertical sum. Pixel values may differ from Pillow's by one in two cases. Either
the exact sum is halfway between two values, because sums are float32. Or the image is tall, because
Pillow 13 resamples tall images vertically first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of the table. The box is four doubles; the columns before the box are integers.
ADDRESS, HEIGHT, WIDTH, FLIP, TARGET, CUTOUT_TOP, CUTOUT_LEFT, BOX = range(8)
COLUMNS = 11
_ADDRESS = tl.constexpr(ADDRESS)
_HEIGHT = tl.constexpr(HEIGHT)
_WIDTH = tl.constexpr(WIDTH)
_FLIP = tl.constexpr(FLIP)
_TARGET = tl.constexpr(TARGET)
_CUTOUT_TOP = tl.constexpr(CUTOUT_TOP)
_CUTOUT_LEFT = tl.constexpr(CUTOUT_LEFT)
_BOX = tl.constexpr(BOX)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _bound(position, most):
    """Rounds the first or last input position of a resampling filter as Pillow does, and clamps it."""
    return tl.minimum(tl.maximum((position + 0.5).to(tl.int32), 0), most)


@triton.jit
def _weight(pixel, centre, reach):
    return tl.maximum(1.0 - tl.abs(pixel - centre + 0.5) / reach, 0.0)


@triton.jit
def crop_kernel(
    table, boxes, out, SIZE: tl.constexpr, CUTOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Resamples the crop of one image to a square; each program computes one output line.

    `table` has one row per image (see `new_table`). `boxes` is the same memory as float64.
    """
    line = tl.program_id(0)
    entry = tl.program_id(1) * _COLUMNS
    image = tl.load(table + entry + _ADDRESS).to(tl.pointer_type(tl.uint8))
    height = tl.load(table + entry + _HEIGHT).to(tl.int32)
    width = tl.load(table + entry + _WIDTH).to(tl.int32)
    left = tl.load(boxes + entry + _BOX).to(tl.float32)
    top = tl.load(boxes + entry + _BOX + 1).to(tl.float32)
    step_x = (tl.load(boxes + entry + _BOX + 2).to(tl.float32) - left) / SIZE
    step_y = (tl.load(boxes + entry + _BOX + 3).to(tl.float32) - top) / SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE

    reach_y = tl.maximum(step_y, 1.0)
    centre_y = top + (line + 0.5) * step_y
    first_y, last_y = _bound(centre_y - reach_y, height), _bound(centre_y + reach_y, height)
    reach_x = tl.maximum(step_x, 1.0)
    centre_x = left + (column.to(tl.float32) + 0.5) * step_x
    first_x, last_x = _bound(centre_x - reach_x, width), _bound(centre_x + reach_x, width)
    taps = tl.max(tl.where(inside, last_x - first_x, 0), axis=0)

    whole_x = tl.zeros((BLOCK,), tl.float32)
    for tap in range(taps):
        x = first_x + tap
        whole_x += tl.where(x < last_x, _weight(x, centre_x, reach_x), 0.0)
    whole_x = tl.where(inside, whole_x, 1.0)
    whole_y = 0.0
    for y in range(first_y, last_y):
        whole_y += _weight(y, centre_y, reach_y)

    plane = height * width
    red = tl.zeros((BLOCK,), tl.float32)
    green = tl.zeros((BLOCK,), tl.float32)
    blue = tl.zeros((BLOCK,), tl.float32)
    for y in range(first_y, last_y):
        sum_red = tl.zeros((BLOCK,), tl.float32)
        sum_green = tl.zeros((BLOCK,), tl.float32)
        sum_blue = tl.zeros((BLOCK,), tl.float32)
        for tap in range(taps):
            x = first_x + tap
            there = inside & (x < last_x)
            weight = _weight(x, centre_x, reach_x)
            at = image + y * width + x
            sum_red += weight * tl.load(at, mask=there, other=0).to(tl.float32)
            sum_green += weight * tl.load(at + plane, mask=there, other=0).to(tl.float32)
            sum_blue += weight * tl.load(at + 2 * plane, mask=there, other=0).to(tl.float32)
        down = _weight(y, centre_y, reach_y) / whole_y
        red += down * tl.floor(sum_red / whole_x + 0.5)
        green += down * tl.floor(sum_green / whole_x + 0.5)
        blue += down * tl.floor(sum_blue / whole_x + 0.5)

    flipped = tl.load(table + entry + _FLIP) > 0
    place = tl.where(flipped, SIZE - 1 - column, column)
    shown = inside
    if CUTOUT > 0:
        cutout_top = tl.load(table + entry + _CUTOUT_TOP)
        cutout_left = tl.load(table + entry + _CUTOUT_LEFT)
        down_in = (line >= cutout_top) & (line < cutout_top + CUTOUT)
        shown = inside & ~(down_in & (place >= cutout_left) & (place < cutout_left + CUTOUT))
    target = tl.load(table + entry + _TARGET)
    to = out + ((target * SIZE + line) * SIZE + place) * 3
    tl.store(to, tl.where(shown, tl.floor(red + 0.5), 0.0).to(tl.uint8), mask=inside)
    tl.store(to + 1, tl.where(shown, tl.floor(green + 0.5), 0.0).to(tl.uint8), mask=inside)
    tl.store(to + 2, tl.where(shown, tl.floor(blue + 0.5), 0.0).to(tl.uint8), mask=inside)


def new_table(samples: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns an empty table for `crop_kernel`, one row per image, and the same memory as float64.

    The columns before BOX are integers; the box in the last columns is float64.
    """
    table = np.zeros((samples, COLUMNS), dtype=np.int64)
    return table, table.view(np.float64)


def crop_into(out: torch.Tensor, table: torch.Tensor, *, cutout: int) -> None:
    """Crops the images that `table` lists, and resamples the crops to the squares in `out`.

    The memory of the images must not be freed before the current stream has finished.

    Args:
        out: Samples × size × size × 3, uint8.
        table: One row per image with address, crop box and flip (see `new_table`), on the device of
            `out`.
        cutout: Side of the cutout in pixels, 0 for none.
    """
    size = out.shape[1]
    if len(table):
        crop_kernel[(size, len(table))](
            table, table.view(torch.float64), out, SIZE=size, CUTOUT=cutout,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip


_BLOCK = 1024


@triton.jit
def normalize_kernel(
    images, out, scale, shift, pixels, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes scale · pixel + shift for BLOCK pixels per program, with a single rounding."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < pixels)[:, None]
    channel = tl.arange(0, OUT)[None, :]
    real = channel < IN
    value = tl.load(images + at[:, None] * IN + channel, mask=inside & real, other=0)
    factor = tl.load(scale + channel, mask=real, other=0.0)
    offset = tl.load(shift + channel, mask=real, other=0.0)
    result = value.to(tl.float32) * factor + offset
    tl.store(out + at[:, None] * OUT + channel, result.to(out.dtype.element_ty), mask=inside)


def normalized(
    images: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype, extra: int
) -> Tensor:
    """Returns normalized images, followed by `extra` channels of zeros.

    Uses torch operators if the number of channels is no power of two.

    Args:
        images: Samples × height × width × channels, uint8.
        scale: Factor by which each channel is multiplied.
        shift: Value that is then added to each channel.
        dtype: Type of the result.
        extra: Number of additional channels.
    """
    samples, height, width, channels = images.shape
    wide = channels + extra
    if wide & (wide - 1):
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        result = torch.addcmul(shift, pixels, scale).to(dtype)
        result = torch.nn.functional.pad(result, (0, 0, 0, 0, 0, extra)) if extra else result
        return result.contiguous(memory_format=torch.channels_last)
    out = torch.empty((samples, height, width, wide), dtype=dtype, device=images.device)
    pixels_count = samples * height * width
    normalize_kernel[(-(-pixels_count // _BLOCK),)](
        images.contiguous(), out, scale, shift, pixels_count, IN=channels, OUT=wide, BLOCK=_BLOCK
    )
    return out.permute(0, 3, 1, 2)
