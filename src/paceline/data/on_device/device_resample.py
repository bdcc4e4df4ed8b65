"""Boxes of images resampled on the device, a batch at a time, as Pillow resamples one.

In: images of one size and a box in each. Out: the boxes scaled to one square, in uint8. A filter turns a
box into two matrices of weights, one a side, and scaling is two products. Weights are whole multiples
of 2⁻²² and levels are rounded after each product, as in Pillow; float64 holds every sum exactly, so the
result is Pillow's to the pixel, in whatever order a device adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.data.region.pass_order import down_first

Filter = Callable[[torch.Tensor], torch.Tensor]
_ONE = 2.0**22


def resample(
    images: torch.Tensor,
    box: Sequence[torch.Tensor],
    flip: torch.Tensor,
    size: int,
    interpolation: str,
) -> torch.Tensor:
    """`images` are samples × height × width × channels, `box` left, top, right and bottom of each,
    `flip` 1 where the result is turned about."""
    height, width = images.shape[1:3]
    left, top, right, bottom = box
    # A half-precision region around the caller must not reach these products.
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
    """From whole multiples of 2⁻²² to whole levels, rounded half up, within 0 to 255."""
    return sums.add_(_ONE / 2).div_(_ONE).floor_().clamp_(0, 255)


def _weights(
    low: torch.Tensor, high: torch.Tensor, stored: int, size: int, interpolation: str
) -> torch.Tensor:
    """Samples × size × stored: what each stored pixel adds to each pixel of the result, times 2²².

    Pixels just outside of the box count where the filter reaches them, as they do in Pillow.
    """
    scale = (high - low).to(torch.float64)[:, None] / size
    pixel = torch.arange(stored, device=low.device, dtype=torch.float64)
    if interpolation == "nearest":
        return (pixel == _nearest(low[:, None] + scale * 0.5, scale, size)).to(torch.float64) * _ONE
    centre = low[:, None] + (torch.arange(size, device=low.device) + 0.5) * scale
    # When shrinking, the filter grows with the step between pixels, so that each stored one counts.
    narrowing = 1 / scale.clamp_min(1)[:, :, None]
    weights = _FILTERS[interpolation]((pixel - centre[:, :, None] + 0.5) * narrowing)
    weights = weights / weights.sum(dim=2, keepdim=True) * _ONE
    return (weights + torch.where(weights < 0, -0.5, 0.5)).trunc_()


def _nearest(start: torch.Tensor, step: torch.Tensor, size: int) -> torch.Tensor:
    """The stored pixel under each centre. Pillow adds up steps, and where a centre falls between
    two pixels its rounding errors decide: hence the same additions, in the same order."""
    centres = [start]
    for _ in range(size - 1):
        centres.append(centres[-1] + step)
    return torch.stack(centres, dim=1).floor_()


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Keys's cubic with a = −1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    """A sinc under a wider sinc, three zeros to each side."""
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


_FILTERS: dict[str, Filter] = {
    "bilinear": _triangle,
    "bicubic": _cubic,
    "lanczos": _lanczos,
}
