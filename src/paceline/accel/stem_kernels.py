"""A Triton kernel that makes the pixels of image windows into channels, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.accel.stem import WindowForm

# The number of elements that a program writes.
ELEMENTS = 2048


@triton.jit
def windows_kernel(
    images, out, positions, height, width, down, across,
    PIXEL: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Copies the window of each position (n, y, x) to the channels of `out`.

    out[n, y, x, (r · SIDE + q) · CHANNELS + c] = images[n, y · STRIDE + r − PAD, x · STRIDE + q −
    PAD, c], and 0 outside of the images and in channels without a pixel. A pixel of `images` has
    PIXEL channels. A program copies BLOCK_M windows. Positions have 32 bits, because 64-bit
    division is slow; offsets of elements have 64 bits.
    """
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = (at % across) * STRIDE - PAD
    first_row = (at // across) % down * STRIDE - PAD
    image = at // (across * down)
    values = tl.arange(0, WIDTH)
    row = values // (SIDE * CHANNELS)
    # Divide first, then take the remainder: only then does the compiler know that `col` is constant
    # over a pixel. If the mask might change within a pixel, the compiler would not load whole
    # pixels at once.
    col = values // CHANNELS % SIDE
    offset = values % (SIDE * CHANNELS)
    if CHANNELS != PIXEL:  # if they are equal, a line of a window is contiguous in memory
        offset = col * PIXEL + values % CHANNELS
    rows = first_row[:, None] + row[None, :]
    cols = first_col[:, None] + col[None, :]
    inside = (at < positions)[:, None]
    ok = inside & (rows >= 0) & (rows < height) & (cols >= 0) & (cols < width)
    ok = ok & (row < SIDE)[None, :]
    start = ((image * height + first_row).to(tl.int64) * width + first_col) * PIXEL
    source = start[:, None] + (row * (width * PIXEL) + offset)[None, :]
    value = tl.load(images + source, mask=ok, other=0.0)
    place = at[:, None].to(tl.int64) * WIDTH + values[None, :]
    tl.store(out + place, value, mask=inside)


def image_windows(images: Tensor, form: WindowForm, down: int, across: int) -> Tensor:
    """Returns the windows (`down` × `across` per image) as channels, in channels-last memory.

    The result has no gradient.
    """
    images = images.detach().contiguous(memory_format=torch.channels_last)
    samples, pixel, height, width = images.shape
    out = torch.empty(
        (samples, form.width, down, across), dtype=images.dtype, device=images.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    positions = samples * down * across
    block = ELEMENTS // form.width
    windows_kernel[(-(-positions // block),)](
        images, out, positions, height, width, down, across,
        PIXEL=pixel, SIDE=form.side, STRIDE=form.stride, PAD=form.padding,
        CHANNELS=form.channels, WIDTH=form.width, BLOCK_M=block,
    )  # fmt: skip
    return out
