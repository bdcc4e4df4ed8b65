"""Normalisation in one pass over memory, as a Triton kernel.

In: uint8 pixels, samples × height × width × channels, on a GPU. Out: scale · pixel + shift for each
channel, rounded once, channels of zeros added behind, in channels-last memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def normalize_kernel(
    images, out, scale, shift, pixels, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: BLOCK pixels with all their channels."""
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
    """samples × (channels + extra) × height × width. Widths that are no power of two get torch's pad."""
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
