"""Batch norm fused with the residual sum, ReLU and max-pool that follow it, as autograd functions.

Results equal those of separate torch operators within rounding, with two thirds of the memory
traffic. The functions take an activation in channels-last memory and its `nn.BatchNorm2d`, which
contains parameters and running statistics. They support only training mode; evaluation uses torch's
operators.

In the docstrings below, a row of an activation is all channels of one pixel. The argument `saved`
is the result of `statistics`, and dz is the gradient of a norm's output (plus residual) before the
ReLU. Tile shapes depend only on sizes, so equal runs on equal devices round equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.accel import kernels
from paceline.accel.recompute import ActivationSource, RecomputedActivation
from paceline.accel.stem import can_launch

# The tile of kernels that join partial sums: parts at a time, and channels of a program.
_JOIN_PARTS, _JOIN_CHANNELS = 64, 16


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a kernel: elements of a tile, number of programs, and warps.

    The values were the fastest on an H200. The programs are several times as many as a GPU runs at
    once. Kernels that sum use fewer programs, so that there are fewer partial sums to join.
    """

    elements: int
    programs: int
    warps: int = 0  # Triton's default


MOMENTS = Tile(2048, 1056, 4)
APPLY = Tile(4096, 8448, 8)
SUMS = Tile(1024, 1056, 4)
INPUT = Tile(4096, 8448, 8)
POOL_SUMS = Tile(512, 2112)
# The elements of a tile of the kernels whose programs compute a single tile.
POOL, POOL_INPUT = 1024, 512


@dataclass(frozen=True)
class Cut:
    """How an activation is divided among programs: `parts` of `span` rows each, and blocks of channels.

    `options` are the compile-time arguments of the kernel: the sizes of a tile and the warps.
    """

    rows: int
    channels: int
    parts: int
    span: int
    grid: tuple[int, int]
    options: dict[str, int]


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def cut(rows: int, channels: int, tile: Tile) -> Cut:
    """Divides an activation among programs; a tile has up to 64 channels (128 bytes in fp16)."""
    (tiles, blocks_c), options = _tiles(rows, channels, tile.elements)
    wanted = max(tile.programs // blocks_c, 1)
    span = -(-tiles // min(wanted, tiles)) * options["BLOCK_M"]
    parts = -(-rows // span)
    if tile.warps:
        options["num_warps"] = tile.warps
    return Cut(rows, channels, parts, span, (parts, blocks_c), options)


def _tiles(rows: int, channels: int, elements: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid for one tile per program, and the sizes of a tile as kernel arguments."""
    block_c = min(power_of_two(channels), 64)
    block_m = max(elements // block_c, 1)
    grid = (-(-rows // block_m), -(-channels // block_c))
    return grid, {"BLOCK_M": block_m, "BLOCK_C": block_c}


def _cut_of(x: Tensor, tile: Tile) -> Cut:
    return cut(x.numel() // x.shape[1], x.shape[1], tile)


def norm_can_fuse(norm: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Returns True if the kernels support the norm: in training mode, with momentum, γ and β."""
    return (
        isinstance(norm, nn.BatchNorm2d)
        and norm.training
        and norm.momentum is not None
        and norm.track_running_stats
        and norm.affine
    )


def can_fuse(x: Tensor, norm: nn.Module) -> bool:
    """Returns True if the kernels support `norm`, and `x` is a channels-last tensor on a GPU."""
    return (
        norm_can_fuse(norm)
        and can_launch(x)
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def norm_act(
    x: Tensor,
    norm: nn.BatchNorm2d,
    residual: Tensor | None = None,
    *,
    relu: bool = True,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes relu(norm(x + bias) + residual).

    Batch norm subtracts the mean, so the `bias` of a convolution before it affects only the running
    mean, and has a gradient of zero. Therefore this function adds it only to the running mean.

    Args:
        x: The output of a convolution without the bias.
        norm: The batch norm, whose running statistics are updated.
        residual: The shortcut of a residual block.
        relu: False to leave out the ReLU.
        bias: The bias of the convolution.
    """
    out: Tensor = _NormAct.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, residual, norm, relu, False, bias, None
    )
    return out


def norm_act_twice(
    x: Tensor, norm: nn.BatchNorm2d, residual: Tensor | None = None, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `norm_act` and returns the output twice, for two operations that read it.

    So autograd passes the gradients of both copies separately, and the backward kernel adds them.
    This saves a pass over the largest activations.
    """
    out: tuple[Tensor, Tensor] = _NormAct.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, residual, norm, True, True, bias, None
    )
    return out


def norm_act_recomputed(
    x: Tensor, norm: nn.BatchNorm2d, residual: Tensor | None = None, *, bias: Tensor | None = None
) -> RecomputedActivation:
    """Computes `norm_act_twice` with an output that is recomputed in the backward pass.

    The residual, if there is one, must be stored.
    """
    source = ActivationSource()
    with source.not_stored():
        branch, shortcut = _NormAct.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, norm.bias, residual, norm, True, True, bias, source
        )
    return RecomputedActivation(branch, shortcut, source)


def check_rows(shape: Sequence[int]) -> None:
    """Raises torch's error for a batch norm in training with a single value per channel."""
    if math.prod(shape) == shape[1]:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{torch.Size(shape)}"
        )


def channels_last(gradient: Tensor) -> Tensor:
    """Returns the tensor in channels-last memory, which the kernels need, copied if necessary."""
    return gradient.contiguous(memory_format=torch.channels_last)


def two_gradients(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients that are not None, followed by None if there are fewer than two."""
    given = (channels_last(gradient) for gradient in gradients if gradient is not None)
    return next(given, None), next(given, None)


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None,
        norm: nn.BatchNorm2d, relu: bool, twice: bool, offset: Tensor | None,
        source: ActivationSource | None,
    ) -> Any:  # fmt: skip
        saved = statistics(x, norm, offset)
        shortcut = None if residual is None else channels_last(residual)
        y = apply(x, saved, shortcut, relu)
        if source is not None:
            kept = None if shortcut is None else shortcut.detach()
            source.set(y, partial(apply, x.detach(), saved, kept, relu))
        # Without a residual, the ReLU mask is computed from x. With a residual, it needs y.
        ctx.save_for_backward(x, weight, saved, *([] if residual is None else [y]))
        ctx.relu = relu
        ctx.set_materialize_grads(False)
        return (y, y.view_as(y)) if twice else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight, saved, *rest = ctx.saved_tensors
        first, second = two_gradients(gradients)
        if first is None:
            return (None,) * 9
        found, dz = backward_sums(
            first, second, x, rest[0] if rest else None, saved, weight, ctx.relu
        )
        if dz is not None:
            dx = backward_input(dz, None, x, saved, found, relu=False)
        else:
            dx = backward_input(first, second, x, saved, found, relu=ctx.relu)
        return dx, found[0], found[1], dz, None, None, None, None, None


def statistics(x: Tensor, norm: nn.BatchNorm2d, offset: Tensor | None = None) -> Tensor:
    """Computes the statistics of `x` and returns mean, 1/σ, scale and shift as four rows.

    Updates the running statistics of `norm` like torch, for the activation x + `offset`.
    """
    check_rows(x.shape)
    return join_moments(moments(x), norm, offset)


@dataclass(frozen=True)
class Moments:
    """Sums over parts of an activation, from which its mean and variance are computed.

    The tensor has the shape [2, parts, channels]. If `span` is not 0, a part has `span` of the
    `rows` rows, and the two values are the mean and the sum of squared deviations. Otherwise they
    are the sum and the sum of squares: of the deviations from the running mean (by fused
    convolutions) if `centred`, else of the values themselves (by cuDNN).
    """

    parts: Tensor
    rows: int
    span: int = 0
    centred: bool = True


def moments(x: Tensor) -> Moments:
    """Computes the mean and the sum of squared deviations for each part of an activation."""
    c = _cut_of(x, MOMENTS)
    parts = x.new_empty((2, c.parts, c.channels), dtype=torch.float32)
    kernels.moments_kernel[c.grid](x, parts, c.rows, c.channels, c.span, **c.options)
    return Moments(parts, c.rows, c.span)


def join_moments(
    found: Moments, norm: nn.BatchNorm2d, offset: Tensor | None = None, *, halves: bool = False
) -> Tensor:
    """Computes mean and variance from the sums of all parts, and updates the running statistics.

    Args:
        found: The sums of each part.
        norm: The norm.
        offset: A bias to add to the running mean (see `norm_act`).
        halves: True to compute scale and shift in fp16, too, as cuDNN reads them.

    Returns:
        The same rows as `statistics`: mean, 1/σ, scale and shift. With `halves`, a fifth row
        contains the fp16 scale and a shift that fits the rounded scale.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    parts, channels = found.parts.shape[1:]
    saved = found.parts.new_empty((5 if halves else 4, channels))
    kernel = kernels.statistics_kernel if found.span else kernels.centred_statistics_kernel
    kernel[(-(-channels // _JOIN_CHANNELS),)](
        found.parts, norm.weight, norm.bias, norm.running_mean, norm.running_var,
        norm.num_batches_tracked, saved, norm.bias if offset is None else offset,
        found.rows, channels, found.span, parts, norm.momentum, norm.eps,
        saved[4].view(torch.float16) if halves else None,
        OFFSET=offset is not None, BLOCK_P=_JOIN_PARTS, BLOCK_C=_JOIN_CHANNELS,
        **({} if found.span else {"CENTRED": found.centred}),
    )  # fmt: skip
    return saved


def apply(x: Tensor, saved: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Returns relu(scale · x + shift + residual), without ReLU or residual if not requested."""
    y = torch.empty_like(x)
    c = _cut_of(x, APPLY)
    kernels.apply_kernel[c.grid](
        x, x if residual is None else residual, y, saved, c.rows, c.channels, c.span,
        RESIDUAL=residual is not None, RELU=relu, **c.options,
    )  # fmt: skip
    return y


def join_sums(parts: Tensor, weight: Tensor, saved: Tensor, rows: int) -> Tensor:
    """Computes the gradients of γ and β from partial sums [2, parts, channels], as five rows.

    The other three rows are the factors a, b and c of `backward_input`. `weight` is γ.
    """
    channels = parts.shape[2]
    factors = parts.new_empty((5, channels))
    kernels.backward_factors_kernel[(-(-channels // _JOIN_CHANNELS),)](
        parts, weight, saved, factors, rows, channels, parts.shape[1],
        BLOCK_P=_JOIN_PARTS, BLOCK_C=_JOIN_CHANNELS,
    )  # fmt: skip
    return factors


def backward_sums(
    dy: Tensor, dy2: Tensor | None, x: Tensor, y: Tensor | None, saved: Tensor, weight: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of γ and β with the factors of `backward_input`, and dz if `y` is given.

    Args:
        dy: The gradient of the output.
        dy2: The gradient of the output's second copy (see `norm_act_twice`).
        x: The input of the norm.
        y: The output, if the norm has a residual.
        saved: The result of `statistics`.
        weight: γ.
        relu: True if the output has a ReLU.
    """
    parts, dz = gradient_sums(dy, dy2, x, y, saved, relu)
    return join_sums(parts, weight, saved, x.numel() // x.shape[1]), dz


def gradient_sums(
    dy: Tensor, dy2: Tensor | None, x: Tensor, y: Tensor | None, saved: Tensor, relu: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes the partial sums that `join_sums` adds up, and dz if `y` is given.

    The arguments are those of `backward_sums`.
    """
    c = _cut_of(x, SUMS)
    parts = x.new_empty((2, c.parts, c.channels), dtype=torch.float32)
    dz = None if y is None else torch.empty_like(x)
    kernels.backward_sums_kernel[c.grid](
        dy, dy if dy2 is None else dy2, x, x if y is None else y, x if dz is None else dz, saved,
        parts, c.rows, c.channels, c.span, TWO=dy2 is not None, RESIDUAL=y is not None,
        RELU=relu, **c.options,
    )  # fmt: skip
    return parts, dz


def backward_input(
    dz: Tensor, dz2: Tensor | None, x: Tensor, saved: Tensor, found: Tensor, relu: bool
) -> Tensor:
    """Returns a · dz + b · x + c, the gradient of a norm's input `x`.

    `found` is the result of `join_sums`. `dz2` is added to `dz`; with `relu`, both are gradients
    after the ReLU.
    """
    dx = torch.empty_like(x)
    c = _cut_of(x, INPUT)
    kernels.backward_input_kernel[c.grid](
        dz, dz if dz2 is None else dz2, x, dx, saved, found, c.rows, c.channels, c.span,
        TWO=dz2 is not None, RELU=relu, **c.options,
    )  # fmt: skip
    return dx


def norm_act_pool(
    x: Tensor, norm: nn.BatchNorm2d, *, padding: int = 1, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes max_pool2d(relu(norm(x + bias)), 3, 2, padding) and returns the result twice.

    Args:
        x: The output of a convolution without the bias.
        norm: The batch norm.
        padding: The padding of the pool, 0 or 1.
        bias: The bias of the convolution, which affects only the running mean (see `norm_act`).
    """
    assert padding in (0, 1), padding
    out: tuple[Tensor, Tensor] = _NormActPool.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm, padding, bias
    )
    return out


class _NormActPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, padding: int,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        saved = statistics(x, norm, offset)
        images, channels, height, width = x.shape
        out_height, out_width = ((side + 2 * padding - 3) // 2 + 1 for side in (height, width))
        shape = (images, channels, out_height, out_width)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        winner = torch.empty_like(y, dtype=torch.uint8)
        positions = images * out_height * out_width
        grid, tile = _tiles(positions, channels, POOL)
        kernels.pool_kernel[grid](
            x, y, winner, saved, positions, height, width, out_height, out_width, channels,
            PAD=padding, **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, saved, winner)
        ctx.padding = padding
        ctx.set_materialize_grads(False)
        return y, y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight, saved, winner = ctx.saved_tensors
        first, second = two_gradients(gradients)
        if first is None:
            return (None,) * 6
        two, second = second is not None, first if second is None else second
        images, channels, height, width = x.shape
        out_height, out_width = winner.shape[2:]
        sizes = (height, width, out_height, out_width, channels)
        positions, rows = images * out_height * out_width, images * height * width
        c = cut(positions, channels, POOL_SUMS)
        parts = x.new_empty((2, c.parts, channels), dtype=torch.float32)
        kernels.pool_sums_kernel[c.grid](
            first, second, x, winner, saved, parts, positions, *sizes, c.span,
            TWO=two, PAD=ctx.padding, **c.options,
        )  # fmt: skip
        found = join_sums(parts, weight, saved, rows)
        dx = torch.empty_like(x)
        more = 2 - ctx.padding
        quads = images * ((height + more) // 2) * ((width + more) // 2)
        grid, tile = _tiles(quads, channels, POOL_INPUT)
        kernels.pool_input_kernel[grid](
            first, second, x, winner, dx, found, quads, *sizes,
            TWO=two, PAD=ctx.padding, **tile,
        )  # fmt: skip
        return dx, found[0], found[1], None, None, None
