"""How the fused norm kernels are cut into programs, and their launches.

In: a map in channels-last memory and its per-channel tensors. Out: results in new tensors. One file
knows tile shapes; the choice depends on sizes alone, so equal runs on equal devices round alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models import norm_kernels as kernels

_JOIN_PARTS, _JOIN_CHANNELS = 64, 16


@dataclass(frozen=True)
class Tile:
    """Elements of one tile, programs to aim at, warps of a program; found by measurement on an H200.

    Programs fill a GPU several times over; those that sum are fewer, so that the join stays short.
    """

    elements: int
    programs: int
    warps: int


MOMENTS = Tile(2048, 1056, 4)
APPLY = Tile(4096, 8448, 8)
SUMS = Tile(1024, 1056, 4)
INPUT = Tile(4096, 8448, 8)


@dataclass(frozen=True)
class Cut:
    """`parts` programs of `span` rows each for every block of channels; tiles of `block_m` rows."""

    rows: int
    channels: int
    block_m: int
    block_c: int
    parts: int
    span: int
    warps: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.parts, -(-self.channels // self.block_c)

    @property
    def join_grid(self) -> tuple[int]:
        return (-(-self.channels // _JOIN_CHANNELS),)


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def cut(rows: int, channels: int, tile: Tile) -> Cut:
    """Tiles 64 channels wide, 128 bytes of half precision, where there are as many."""
    block_c = min(power_of_two(channels), 64)
    block_m = max(tile.elements // block_c, 1)
    blocks_c = -(-channels // block_c)
    wanted = max(tile.programs // blocks_c, 1)
    tiles = -(-rows // block_m)
    span = -(-tiles // min(wanted, tiles)) * block_m
    return Cut(rows, channels, block_m, block_c, -(-rows // span), span, tile.warps)


def statistics(x: Tensor, norm: nn.BatchNorm2d, offset: Tensor | None = None) -> Tensor:
    """Mean, 1/σ, scale and shift as four rows; updates the running statistics as torch does, those of
    x + `offset`."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    c = cut(rows, channels, MOMENTS)
    parts = x.new_empty((2, c.parts, channels), dtype=torch.float32)
    kernels.moments_kernel[c.grid](
        x,
        parts,
        rows,
        channels,
        c.span,
        BLOCK_M=c.block_m,
        BLOCK_C=c.block_c,
        num_warps=c.warps,
    )
    saved = x.new_empty((4, channels), dtype=torch.float32)
    kernels.statistics_kernel[c.join_grid](
        parts, norm.weight, norm.bias, norm.running_mean, norm.running_var,
        norm.num_batches_tracked, saved, norm.bias if offset is None else offset,
        rows, channels, c.span, c.parts, norm.momentum, norm.eps, OFFSET=offset is not None,
        BLOCK_P=_JOIN_PARTS, BLOCK_C=_JOIN_CHANNELS,
    )  # fmt: skip
    return saved


def apply(x: Tensor, saved: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """relu(scale · x + shift + residual)."""
    y = torch.empty_like(x)
    c = cut(x.numel() // x.shape[1], x.shape[1], APPLY)
    kernels.apply_kernel[c.grid](
        x, x if residual is None else residual, y, saved, c.rows, c.channels, c.span,
        RESIDUAL=residual is not None, RELU=relu, BLOCK_M=c.block_m, BLOCK_C=c.block_c,
        num_warps=c.warps,
    )  # fmt: skip
    return y


def join_sums(parts: Tensor, weight: Tensor, saved: Tensor, rows: int) -> Tensor:
    """Second stage of the backward sums over `parts`, [2, parts, channels]. Five rows: gradients of γ
    and β, and the three factors of `backward_input`."""
    channels = parts.shape[2]
    found = parts.new_empty((5, channels))
    kernels.backward_factors_kernel[(-(-channels // _JOIN_CHANNELS),)](
        parts, weight, saved, found, rows, channels, parts.shape[1],
        BLOCK_P=_JOIN_PARTS, BLOCK_C=_JOIN_CHANNELS,
    )  # fmt: skip
    return found


def backward_sums(
    dy: Tensor, dy2: Tensor | None, x: Tensor, y: Tensor | None, saved: Tensor, weight: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The rows of `join_sums`, and dz where the norm had a residual (`y` is given)."""
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    c = cut(rows, channels, SUMS)
    parts = x.new_empty((2, c.parts, channels), dtype=torch.float32)
    dz = None if y is None else torch.empty_like(x)
    kernels.backward_sums_kernel[c.grid](
        dy, dy if dy2 is None else dy2, x, x if y is None else y, x if dz is None else dz, saved,
        parts, rows, channels, c.span, TWO=dy2 is not None, RESIDUAL=y is not None,
        RELU=relu, BLOCK_M=c.block_m, BLOCK_C=c.block_c,
        num_warps=c.warps,
    )  # fmt: skip
    return join_sums(parts, weight, saved, rows), dz


def backward_input(
    dz: Tensor, dz2: Tensor | None, x: Tensor, saved: Tensor, found: Tensor, relu: bool
) -> Tensor:
    """The gradient of the map that was normalised."""
    dx = torch.empty_like(x)
    c = cut(x.numel() // x.shape[1], x.shape[1], INPUT)
    kernels.backward_input_kernel[c.grid](
        dz, dz if dz2 is None else dz2, x, dx, saved, found, c.rows, c.channels, c.span,
        TWO=dz2 is not None, RELU=relu, BLOCK_M=c.block_m, BLOCK_C=c.block_c,
        num_warps=c.warps,
    )  # fmt: skip
    return dx
