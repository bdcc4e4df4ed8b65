"""Boxes of images of any size, resampled to one square each, by one Triton kernel for all of them.

In: decoded images wherever they lie on a GPU, by their addresses, a box in each, flips and holes. Out:
samples × height × width × 3 in uint8. The filter is Pillow's triangle, which grows with the step between
pixels when it shrinks; sums across are rounded to whole levels before they are summed down, as in
Pillow. Levels may be off by one: where the exact sum lies halfway, for sums are float32, and in tall
images, where Pillow from version 13 on sums down first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

# Columns of the table: the first are whole numbers, the box is four doubles.
ADDRESS, HEIGHT, WIDTH, FLIP, TARGET, HOLE_TOP, HOLE_LEFT, BOX = range(8)
COLUMNS = 11
_ADDRESS = tl.constexpr(ADDRESS)
_HEIGHT = tl.constexpr(HEIGHT)
_WIDTH = tl.constexpr(WIDTH)
_FLIP = tl.constexpr(FLIP)
_TARGET = tl.constexpr(TARGET)
_HOLE_TOP = tl.constexpr(HOLE_TOP)
_HOLE_LEFT = tl.constexpr(HOLE_LEFT)
_BOX = tl.constexpr(BOX)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _bound(position, most):
    """Pillow's rounding of a filter's edge, within the image."""
    return tl.minimum(tl.maximum((position + 0.5).to(tl.int32), 0), most)


@triton.jit
def _weight(pixel, centre, reach):
    return tl.maximum(1.0 - tl.abs(pixel - centre + 0.5) / reach, 0.0)


@triton.jit
def crop_kernel(
    table, boxes, out, SIZE: tl.constexpr, HOLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one line of one square. `boxes` is the table seen as doubles."""
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

    plane = height * width if not INTERLEAVED else 1
    pitch = 1 if not INTERLEAVED else 3
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
            at = image + (y * width + x) * pitch
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
    if HOLE > 0:
        hole_top = tl.load(table + entry + _HOLE_TOP)
        hole_left = tl.load(table + entry + _HOLE_LEFT)
        down_in = (line >= hole_top) & (line < hole_top + HOLE)
        shown = inside & ~(down_in & (place >= hole_left) & (place < hole_left + HOLE))
    target = tl.load(table + entry + _TARGET)
    to = out + ((target * SIZE + line) * SIZE + place) * 3
    tl.store(to, tl.where(shown, tl.floor(red + 0.5), 0.0).to(tl.uint8), mask=inside)
    tl.store(to + 1, tl.where(shown, tl.floor(green + 0.5), 0.0).to(tl.uint8), mask=inside)
    tl.store(to + 2, tl.where(shown, tl.floor(blue + 0.5), 0.0).to(tl.uint8), mask=inside)


def new_table(samples: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """A table to fill, and the same memory as doubles, of which the columns from BOX on are."""
    table = np.zeros((samples, COLUMNS), dtype=np.int64)
    return table, table.view(np.float64)


def crop_into(out: torch.Tensor, table: torch.Tensor, *, hole: int, interleaved: bool) -> None:
    """Fills the rows of `out` that `table`, on the same device, names. The images must stay until the
    stream is through with them. `interleaved`: a pixel's three bytes lie together, else in planes."""
    size = out.shape[1]
    if len(table):
        crop_kernel[(size, len(table))](
            table, table.view(torch.float64), out, SIZE=size, HOLE=hole, INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
