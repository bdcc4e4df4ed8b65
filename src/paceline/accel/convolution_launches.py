"""Launches the kernels of `product_kernels`: 1 × 1 convolutions of stride 1 and their gradients.

These convolutions are matrix products of activations, with a row for each pixel and a column for
each channel. A launch divides the rows into parts, about as many as the GPU can run programs at a
time, and allocates the outputs. `fused_convolutions` chooses the tile shape. While
`implementation_choice.building` is set, kernels are compiled but not run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.accel import product_kernels as kernels
from paceline.accel.convolution_tiles import Tile
from paceline.accel.implementation_choice import building
from paceline.accel.operands import MERGED, PLAIN, Epilogue, Gradients, Operand

# The most elements of a part, because kernels compute offsets in a part with 32 bits.
_MOST_ELEMENTS = 2**31 - 1
# The tile of `join_products_kernel`: parts and elements that a program adds at a time.
_JOIN_PARTS, _JOIN_ELEMENTS = 32, 64
# The number of multiprocessors assumed in Triton's interpreter, which needs no GPU.
_INTERPRETED_PROCESSORS = 3


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _span(rows: int, widest: int, block: int, programs: int) -> int:
    """Returns how many rows each program computes if the rows are divided among `programs`.

    Args:
        rows: The number of rows of the activation, one for each pixel.
        widest: The largest number of channels of an activation.
        block: The number of rows of a tile, of which the result is a multiple.
        programs: The desired number of programs.
    """
    tiles = -(-rows // block)
    span = -(-tiles // max(min(programs, tiles), 1)) * block
    return max(min(span, _MOST_ELEMENTS // widest // block * block), block)


def resident_programs(tile: Tile, operand: Operand, end: Epilogue) -> int:
    """Returns how many programs fit on a multiprocessor at a time, or 0 if the tile is too large."""
    k, maps = operand.x.shape[1], 1 if operand.other is None else 2
    return tile.resident(k, inputs=maps, computed=operand.form != PLAIN, ends=len(end.maps()))


def _run(kernel: Any, programs: int, *given: object, **options: object) -> None:
    if building.get():
        kernel.warmup(*given, grid=(programs,), **options)
    else:
        kernel[(programs,)](*given, **options)


def launch_convolution(
    operand: Operand, weight: Tensor, tile: Tile, *, forward: bool, epilogue: int, side: bool,
    centre: Tensor | None = None, end: Epilogue | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes a 1 × 1 convolution or, if not `forward`, the gradient of its input.

    Args:
        operand: The input of the convolution, or the gradient of its output.
        weight: The weight of the convolution.
        tile: The launch parameters of the kernel.
        forward: True to compute the convolution.
        epilogue: The operation that the kernel applies to the result (see `product_kernels`).
        side: True to store the operand, too.
        centre: The running mean, which the epilogue `MOMENTS` subtracts before it sums.
        end: The tensors that the epilogue of a gradient reads.

    Returns:
        The result, the epilogue's partial sums over rows, and the stored operand if `side` is True.
    """
    x, rows = operand.x, operand.rows
    images, k, height, width = x.shape
    n = weight.shape[0] if forward else weight.shape[1]
    blocks = -(-n // tile.block_n)
    end = end or Epilogue.plain(x)
    programs = max(resident_programs(tile, operand, end), 1) * _processors(x.device)
    span = _span(rows, max(k, n), tile.block_m, programs // blocks)
    parts = -(-rows // span)
    out = torch.empty(
        (images, n, height, width), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    sums = _sums(end, epilogue, parts, n)
    kept = torch.empty_like(x) if side else None
    maps, described = _maps(tile, tile.block_n, out, end)
    groups, lines = tile.rows(tile.block_n)
    _run(
        kernels.product_kernel, parts * blocks,
        x, _or(operand.other, x), _or(operand.saved, x), _or(operand.found, x), _or(kept, x), weight,
        *maps, *end.saved(x), _or(centre, x), _or(sums, x), rows, span, k, n,
        FORM=operand.form, RELU=operand.relu, SIDE=side, FORWARD=forward, EPILOGUE=epilogue,
        ADD=end.add is not None, PROJECT=end.shortcut is not None,
        SINGLE=k <= tile.block_k, EVEN_K=k % tile.block_k == 0, EVEN_N=n % tile.block_n == 0,
        STAGES=tile.stages, TURNED=tile.turned, DESCRIBED=described,
        GROUPS=groups, LINES=lines, EVEN_M=rows % tile.block_m == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, sums, kept


def _maps(
    tile: Tile, block: int, out: Tensor, end: Epilogue
) -> tuple[list[Tensor | TensorDescriptor], bool]:
    """Returns the tensors that a kernel writes and that its epilogue reads, as kernel arguments.

    The second result is True if the arguments are tensor descriptors with `block` columns, for the
    copy engine of Hopper GPUs. That engine needs rows whose size is a multiple of 16 bytes.
    """
    n = out.shape[1]
    other = None if end.shortcut is None else end.shortcut.x
    maps = (out, end.like, end.y, end.add, other)
    described = tile.turned and all(
        given is None or (given.data_ptr() % 16 == 0 and n * given.element_size() % 16 == 0)
        for given in maps
    )
    if not described:
        return [_or(given, out) for given in maps], False
    return [
        TensorDescriptor(_or(given, out), [out.numel() // n, n], [n, 1], [tile.block_m, block])
        for given in maps
    ], True


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Returns `tensor`, or `unused` for None, because kernels need a pointer for each argument."""
    return unused if tensor is None else tensor


def launch_weight_gradient(
    gradient: Operand, weight: Tensor, inputs: Operand, tile: Tile
) -> Tensor:
    (out, into), rows = weight.shape[:2], gradient.rows
    tiles = -(-out // tile.block_n) * -(-into // tile.block_k)
    programs = tile.programs * _processors(weight.device) // tiles
    span = _span(rows, max(out, into), tile.block_m, programs)
    parts = -(-rows // span)
    x, source = gradient.x, inputs.x
    partial_products = torch.empty((parts, out, into), dtype=torch.float32, device=x.device)
    _run(
        kernels.weight_gradient_kernel, parts * tiles,
        x, _or(gradient.other, x), _or(gradient.saved, x), _or(gradient.found, x),
        source, _or(inputs.saved, source), partial_products, rows, span, out, into,
        FORM=gradient.form, RELU=gradient.relu, INPUT_FORM=inputs.form,
        EVEN=out % tile.block_n == 0 and into % tile.block_k == 0,
        BLOCK_R=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _join_products(partial_products, weight)


def _sums(end: Epilogue, form: int, parts: int, columns: int) -> Tensor | None:
    """Allocates [2 or 4, parts, columns] for the partial sums of an epilogue; None if it has none."""
    if form == PLAIN:
        return None
    norms = 1 if end.shortcut is None else 2
    return end.like.new_empty((2 * norms, parts, columns), dtype=torch.float32)


def _join_products(partial_products: Tensor, weight: Tensor) -> Tensor:
    found = torch.empty_like(weight)
    _run(
        kernels.join_products_kernel, -(-weight.numel() // _JOIN_ELEMENTS),
        partial_products, found, weight.numel(), len(partial_products),
        BLOCK_P=_JOIN_PARTS, BLOCK_E=_JOIN_ELEMENTS,
    )  # fmt: skip
    return found


def launch_both_gradients(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, tile: Tile
) -> Gradients:
    """Computes the gradients of a convolution's input and weight with a single kernel."""
    (out, into), rows = weight.shape[:2], gradient.rows
    span = _span(rows, max(out, into), tile.block_m, tile.programs * _processors(weight.device))
    parts = -(-rows // span)
    x, source = gradient.x, inputs.x
    assert end.form != MERGED or source is end.y
    dx = torch.empty_like(end.like)
    sums = _sums(end, end.form, parts, into)
    partial_products = torch.empty((parts, out, into), dtype=torch.float32, device=x.device)
    maps, described = _maps(tile, tile.block_k, dx, end)
    groups, lines = tile.rows(tile.block_k)
    _run(
        kernels.both_gradients_kernel, parts,
        x, _or(gradient.other, x), _or(gradient.saved, x), _or(gradient.found, x), weight,
        source, _or(inputs.saved, source), *maps, *end.saved(x), _or(sums, x), partial_products,
        rows, span, out, into,
        FORM=gradient.form, RELU=gradient.relu, INPUT_FORM=inputs.form, EPILOGUE=end.form,
        ADD=end.add is not None, PROJECT=end.shortcut is not None, STAGES=tile.stages,
        TURNED=tile.turned, DESCRIBED=described, GROUPS=groups, LINES=lines,
        # Row masks are left out only for turned tiles: for the rest, the compiler would then not
        # prefetch the gradient.
        EVEN_M=tile.turned and rows % tile.block_m == 0,
        EVEN=out == tile.block_n and into == tile.block_k,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return Gradients(dx, sums, _join_products(partial_products, weight))
