"""Batch norm, ReLU and a max-pool in one, for autograd.

In: a convolution's output in channels-last memory. Out: the pooled map, twice (see `norm_act_twice`):
a first residual block uses it in both of its ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.models import norm_launch, pool_kernels
from paceline.models.fused_norm import as_map, check_rows

# Elements of a tile, as in `norm_launch`.
POOL, POOL_INPUT = 1024, 512
POOL_SUMS = norm_launch.Tile(512, 2112, 4)


def norm_act_pool(
    x: Tensor, norm: nn.BatchNorm2d, *, padding: int = 1, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """max_pool2d(relu(norm(x + bias)), 3, 2, padding) for a padding of 0 or 1, one name for each of two
    uses. `bias` is the convolution's: it moves nothing but the running mean (see `norm_act`)."""
    check_rows(x)
    assert padding in (0, 1), padding
    out: tuple[Tensor, Tensor] = _NormActPool.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm, padding, bias
    )
    return out


def _tiles(positions: int, channels: int, elements: int) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid of one tile a program, and the tile."""
    block_c = min(norm_launch.power_of_two(channels), 64)
    block_m = max(elements // block_c, 1)
    grid = (-(-positions // block_m), -(-channels // block_c))
    return grid, {"BLOCK_M": block_m, "BLOCK_C": block_c}


class _NormActPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, padding: int,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        saved = norm_launch.statistics(x, norm, offset)
        images, channels, height, width = x.shape
        out_height, out_width = ((side + 2 * padding - 3) // 2 + 1 for side in (height, width))
        shape = (images, channels, out_height, out_width)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        winner = torch.empty_like(y, dtype=torch.uint8)
        positions = images * out_height * out_width
        grid, tile = _tiles(positions, channels, POOL)
        pool_kernels.pool_kernel[grid](
            x,
            y,
            winner,
            saved,
            positions,
            height,
            width,
            out_height,
            out_width,
            channels,
            PAD=padding,
            **tile,
        )
        ctx.save_for_backward(x, weight, saved, winner)
        ctx.padding = padding
        ctx.set_materialize_grads(False)
        return y, y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight, saved, winner = ctx.saved_tensors
        given = [as_map(g) for g in gradients if g is not None]
        if not given:
            return (None,) * 6
        first, two = given[0], len(given) > 1
        second = given[1] if two else first
        images, channels, height, width = x.shape
        out_height, out_width = winner.shape[2:]
        sizes = (height, width, out_height, out_width, channels)
        positions, rows = images * out_height * out_width, images * height * width
        c = norm_launch.cut(positions, channels, POOL_SUMS)
        parts = x.new_empty((2, c.parts, channels), dtype=torch.float32)
        pool_kernels.pool_sums_kernel[c.grid](
            first, second, x, winner, saved, parts, positions, *sizes, c.span,
            TWO=two, PAD=ctx.padding, BLOCK_M=c.block_m, BLOCK_C=c.block_c,
        )  # fmt: skip
        found = norm_launch.join_sums(parts, weight, saved, rows)
        dx = torch.empty_like(x)
        more = 2 - ctx.padding
        quads = images * ((height + more) // 2) * ((width + more) // 2)
        grid, tile = _tiles(quads, channels, POOL_INPUT)
        pool_kernels.pool_input_kernel[grid](
            first,
            second,
            x,
            winner,
            dx,
            found,
            quads,
            *sizes,
            TWO=two,
            PAD=ctx.padding,
            **tile,
        )
        return dx, found[0], found[1], None, None, None
