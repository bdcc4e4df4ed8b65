"""Convolutions of a fused block with what is around them: forward, and both gradients.

Each has several forms: the `TILES` of `product_kernels`, for 1 × 1 convolutions of stride 1; kernels of
cuDNN (`cudnn_forms`), in fp16; and the separate one, the norm's kernels around a convolution of torch.
All give the same values within rounding; `product_choice` times them and keeps the fastest one for each
shape and device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models import cudnn_forms
from paceline.models import product_kernels as kernels
from paceline.models.fused import (
    Moments,
    as_map,
    check_rows,
    gradient_sums,
    join_moments,
    moments,
    power_of_two,
)
from paceline.models.operands import (
    FORMS,
    MERGED,
    MOMENTS,
    NORMALIZED,
    PLAIN,
    Epilogue,
    Gradients,
    Operand,
    joined_factors,
    out_dims,
)
from paceline.models.product_choice import SEPARATE, choose

# Offsets inside a part are counted in 32 bits.
_MOST_ELEMENTS = 2**31 - 1
# Parts and elements per program that adds up partial products.
_JOIN_PARTS, _JOIN_ELEMENTS = 32, 64
# Without a GPU, in Triton's interpreter.
_INTERPRETED_PROCESSORS = 3


@dataclass(frozen=True)
class Tile:
    """Tile of a program, its warps and pipeline stages, programs per multiprocessor, and the registers
    of a thread where they are limited, so that so many programs fit. `flat`: the loops over tiles and
    over input channels are one to the pipeline, which then loads the next tile ahead."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None
    flat: bool = True

    @property
    def name(self) -> str:
        limited = f"r{self.registers}" if self.registers else ""
        flat = "" if self.flat else "n"
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{size}w{self.warps}s{self.stages}{limited}{flat}"


# Rows × output channels × input channels: of a dozen that were timed on an H200, those that were fastest
# for some shape of ResNet-50. More than 64 registers a thread for the result would spill.
TILES = (
    Tile(64, 128, 64, 4, 3, 2),
    Tile(128, 128, 64, 8, 3, 1, flat=False),
    Tile(128, 64, 64, 8, 3, 2, registers=128),
    Tile(64, 64, 64, 4, 4, 2),
)
# Rows of a step × output channels × input channels.
WEIGHT_TILES = (
    Tile(64, 64, 256, 8, 3, 1),
    Tile(64, 64, 128, 4, 3, 2),
    Tile(64, 128, 64, 4, 3, 2),
    Tile(64, 128, 128, 8, 3, 1),
    Tile(64, 64, 64, 4, 4, 2),
)
# Both gradients at once: rows of a step × output channels × input channels, all of them.
BOTH_TILES = (
    Tile(64, 256, 64, 8, 2, 1),
    Tile(32, 64, 256, 8, 3, 1),
    Tile(64, 64, 64, 4, 3, 2),
)


def _fits(tile: Tile, k: int, n: int) -> bool:
    """No wider than the map; all columns in few tiles, which read the operand once each."""
    wide, deep = max(power_of_two(n), 16), max(power_of_two(k), 16)
    if k <= tile.block_k and not tile.flat:  # one loop only
        return False
    return min(wide, 128) <= tile.block_n <= max(wide, 64) and tile.block_k <= max(deep, 64)


def _weight_fits(tile: Tile, k: int, n: int) -> bool:
    wide, deep = max(power_of_two(n), 64), max(power_of_two(k), 64)
    if wide == deep == 64:
        return tile.block_n == tile.block_k == 64
    return tile.block_n <= wide and tile.block_k <= deep and tile.block_n * tile.block_k > 64 * 64


def _both_fits(tile: Tile, k: int, n: int) -> bool:
    return power_of_two(max(n, 64)) == tile.block_n and power_of_two(max(k, 64)) == tile.block_k


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _span(rows: int, widest: int, block: int, programs: int) -> int:
    """Rows of a part: about `programs` parts of whole tiles."""
    tiles = -(-rows // block)
    span = -(-tiles // max(min(programs, tiles), 1)) * block
    return max(min(span, _MOST_ELEMENTS // widest // block * block), block)


def _launch(
    operand: Operand, weight: Tensor, tile: Tile, *, forward: bool, epilogue: int, side: bool,
    centre: Tensor | None = None, end: Epilogue | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The product, sums of its epilogue, and the operand if `side`."""
    x, rows = operand.x, operand.rows
    images, k, height, width = x.shape
    n = weight.shape[0] if forward else weight.shape[1]
    blocks = -(-n // tile.block_n)
    span = _span(rows, max(k, n), tile.block_m, tile.programs * _processors(x.device) // blocks)
    parts = -(-rows // span)
    out = torch.empty(
        (images, n, height, width), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    end = end or Epilogue.plain(x)
    branch, shortcut = end.branch, end.shortcut
    sums, project = None, shortcut is not None
    if epilogue != PLAIN:
        sums = torch.zeros((4 if project else 2, parts, n), dtype=torch.float32, device=x.device)
    kept = torch.empty_like(x) if side else None
    single = k <= tile.block_k
    kernels.product_kernel[(parts * blocks,)](
        x, _or(operand.other, x), _or(operand.saved, x), _or(operand.found, x), _or(kept, x), weight,
        out, end.like, _or(end.y, x), _or(end.add, x), branch.saved if branch else x,
        shortcut.x if shortcut else x, shortcut.saved if shortcut else x,
        _or(centre, x), _or(sums, x), rows, span, k, n,
        FORM=operand.form, RELU=operand.relu, SIDE=side, FORWARD=forward, EPILOGUE=epilogue,
        ADD=end.add is not None, PROJECT=project, SINGLE=single, EVEN_K=k % tile.block_k == 0,
        EVEN_N=n % tile.block_n == 0, OUTER_STAGES=tile.stages if single or tile.flat else 1,
        FLAT=tile.flat and not single,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return out, sums, kept


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel takes some pointer also where it reads nothing."""
    return unused if tensor is None else tensor


def _key(what: str, operand: Operand, weight: Tensor, stride: int, *more: object) -> str:
    out, into, size, _ = weight.shape
    form = FORMS[operand.form] + (" relu" if operand.relu else "")
    kind = str(weight.dtype).removeprefix("torch.")
    window = "" if size == stride == 1 else f"{size}/{stride}"
    words = [f"{what} {operand.rows}x{into}x{out} {kind} {form}", window, *map(str, more)]
    return " ".join(filter(None, words))


def is_product(weight: Tensor, stride: int) -> bool:
    """Whether the convolution is a product of matrices of rows × channels."""
    return stride == 1 and tuple(weight.shape[2:]) == (1, 1)


def forward_product(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, stride: int = 1, *, keep: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The convolution, the statistics of `norm` on it (see `fused.statistics`), which updates the
    running ones, and the stored operand if `keep`, else where there is one and not `recompute`. The
    padding is half the size of the weight."""
    check_rows(out_dims(tuple(operand.x.shape), tuple(weight.shape), stride))
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {
        tile.name: partial(_fused_forward, operand, weight, norm, tile, keep)
        for tile in (TILES if is_product(weight, stride) else ())
        if _fits(tile, into, out)
    }
    forms.update(cudnn_forms.forward(operand, weight, stride, keep))
    forms[SEPARATE] = partial(_separate_forward, operand, weight, stride)
    how = "kept" if keep else "recomputed" if recompute else ""
    key = _key("forward", operand, weight, stride, how)
    then = None
    if operand.form == NORMALIZED:
        # A form that does not store the operand leaves more to the weight's gradient.
        then = partial(_weight_gradient_after, operand, weight, stride, recompute)
    found, sums, kept = forms[choose(key, forms, operand.x.device, then)]()
    return found, join_moments(sums, norm), None if recompute else kept


def _weight_gradient_after(
    operand: Operand, weight: Tensor, stride: int, recompute: bool,
    found: tuple[Tensor, Moments, Tensor | None],
) -> Tensor:  # fmt: skip
    """For its time: the output is in the place of its gradient."""
    out, _, kept = found
    inputs = operand if kept is None or recompute else Operand(kept)
    return _stored_weight_gradient(out, weight, inputs, stride)


def _fused_forward(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, tile: Tile, keep: bool
) -> tuple[Tensor, Moments, Tensor | None]:
    out, sums, kept = _launch(
        operand, weight, tile, forward=True, epilogue=MOMENTS, side=keep, centre=norm.running_mean
    )
    assert sums is not None
    return out, Moments(sums, operand.rows), kept


def _separate_forward(
    operand: Operand, weight: Tensor, stride: int
) -> tuple[Tensor, Moments, Tensor | None]:
    stored = operand.stored()
    out = as_map(F.conv2d(stored, weight, None, stride, _padding(weight)))
    return out, moments(out), stored


def _padding(weight: Tensor) -> tuple[int, int]:
    return weight.shape[2] // 2, weight.shape[3] // 2


def backward_product(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int = 1, *,
    wants_weight: bool,
) -> Gradients:  # fmt: skip
    """Both gradients of a convolution of `inputs`.

    Either each product computes the gradient of the convolution's output for itself, or, with few
    channels, one kernel gives both, or that gradient is stored for kernels of cuDNN or of torch. (That
    the first product stores it for the second was slower than all of these.)
    """
    forms: dict[str, Callable[[], Gradients]] = {}
    if is_product(weight, stride):
        forms["fused"] = partial(_fused_backward, gradient, weight, inputs, end, wants_weight)
    forms[SEPARATE] = partial(
        _separate_backward, gradient, weight, inputs, end, stride, wants_weight
    )
    if cudnn_forms.has_input_gradient(gradient, weight, end, stride):
        forms["cudnn"] = partial(
            _cudnn_backward, gradient, weight, inputs, end, stride, wants_weight
        )
    if wants_weight and is_product(weight, stride):
        for tile in BOTH_TILES:
            if _both_fits(tile, weight.shape[1], weight.shape[0]):
                forms[f"both {tile.name}"] = partial(
                    _both_gradients, gradient, weight, inputs, end, tile
                )
    key = _key(
        "backward", gradient, weight, stride, end.describe(), FORMS[inputs.form], wants_weight
    )
    return forms[choose(key, forms, gradient.x.device)]()


def _fused_backward(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, wants_weight: bool
) -> Gradients:
    dx, parts = input_gradient(gradient, weight, end)
    found = weight_gradient(gradient, weight, inputs) if wants_weight else None
    return Gradients(dx, found, joined_factors(end, parts))


def input_gradient(
    gradient: Operand, weight: Tensor, end: Epilogue
) -> tuple[Tensor, Tensor | None]:
    """gradient · weight behind `end`, and its partial sums."""
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], tuple[Tensor, Tensor | None, Tensor | None]]] = {
        tile.name: partial(
            _launch, gradient, weight, tile, forward=False, epilogue=end.form, side=False, end=end
        )
        for tile in TILES
        if _fits(tile, out, into)
    }
    key = _key("input", gradient, weight, 1, end.describe())
    dx, parts, _ = forms[choose(key, forms, gradient.x.device)]()
    return dx, parts


def weight_gradient(gradient: Operand, weight: Tensor, inputs: Operand) -> Tensor:
    """gradientᵀ · inputs, in the shape of `weight`."""
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], Tensor]] = {
        tile.name: partial(_fused_weight, gradient, weight, inputs, tile)
        for tile in WEIGHT_TILES
        if _weight_fits(tile, into, out)
    }
    key = _key("weight", gradient, weight, 1, FORMS[inputs.form])
    return forms[choose(key, forms, gradient.x.device)]()


def _fused_weight(gradient: Operand, weight: Tensor, inputs: Operand, tile: Tile) -> Tensor:
    (out, into), rows = weight.shape[:2], gradient.rows
    tiles = -(-out // tile.block_n) * -(-into // tile.block_k)
    programs = tile.programs * _processors(weight.device) // tiles
    span = _span(rows, max(out, into), tile.block_m, programs)
    parts = -(-rows // span)
    x, source = gradient.x, inputs.x
    partial_products = torch.empty((parts, out, into), dtype=torch.float32, device=x.device)
    kernels.weight_gradient_kernel[(parts * tiles,)](
        x, _or(gradient.other, x), _or(gradient.saved, x), _or(gradient.found, x),
        source, _or(inputs.saved, source), partial_products, rows, span, out, into,
        FORM=gradient.form, RELU=gradient.relu, INPUT_FORM=inputs.form,
        EVEN=out % tile.block_n == 0 and into % tile.block_k == 0,
        BLOCK_R=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _join_products(partial_products, weight)


def _join_products(partial_products: Tensor, weight: Tensor) -> Tensor:
    found = torch.empty_like(weight)
    kernels.join_products_kernel[(-(-weight.numel() // _JOIN_ELEMENTS),)](
        partial_products, found, weight.numel(), len(partial_products),
        BLOCK_P=_JOIN_PARTS, BLOCK_E=_JOIN_ELEMENTS,
    )  # fmt: skip
    return found


def _both_gradients(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, tile: Tile
) -> Gradients:
    (out, into), rows = weight.shape[:2], gradient.rows
    span = _span(rows, max(out, into), tile.block_m, tile.programs * _processors(weight.device))
    parts = -(-rows // span)
    branch, shortcut = end.branch, end.shortcut
    x, source, project = gradient.x, inputs.x, shortcut is not None
    assert end.form != MERGED or source is end.y
    dx = torch.empty_like(end.like)
    sums = None
    if end.form != PLAIN:
        sums = torch.zeros((4 if project else 2, parts, into), dtype=torch.float32, device=x.device)
    partial_products = torch.empty((parts, out, into), dtype=torch.float32, device=x.device)
    kernels.both_gradients_kernel[(parts,)](
        x, _or(gradient.other, x), _or(gradient.saved, x), _or(gradient.found, x), weight,
        source, _or(inputs.saved, source), dx, end.like, _or(end.y, x), _or(end.add, x),
        branch.saved if branch else x, shortcut.x if shortcut else x,
        shortcut.saved if shortcut else x, _or(sums, x), partial_products, rows, span, out, into,
        FORM=gradient.form, RELU=gradient.relu, INPUT_FORM=inputs.form, EPILOGUE=end.form,
        ADD=end.add is not None, PROJECT=project, STAGES=tile.stages,
        EVEN=out == tile.block_n and into == tile.block_k,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    found = _join_products(partial_products, weight)
    return Gradients(dx, found, joined_factors(end, sums))


def _torch_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, stride: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = (
        torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, [stride, stride], [*_padding(weight)], [1, 1], False,
            [0, 0], 1, [*wanted, False],
        )
    )  # fmt: skip
    return found[0], found[1]


def _separate_backward(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int,
    wants_weight: bool,
) -> Gradients:  # fmt: skip
    stored = gradient.stored()
    # The gradient of the input needs only the shape of the input.
    source = inputs.stored() if wants_weight else end.like
    dx, found = _torch_backward(stored, source, weight, stride, (True, wants_weight))
    assert dx is not None
    dx = as_map(dx)
    if end.branch is None:
        return Gradients(dx, found)
    parts, dz = gradient_sums(dx, end.add, end.branch.x, end.y, end.branch.saved, relu=True)
    dz = dx if dz is None else dz
    if end.shortcut is not None:
        more, _ = gradient_sums(dz, None, end.shortcut.x, None, end.shortcut.saved, relu=False)
        parts = torch.cat((parts, more))
    return Gradients(dz, found, joined_factors(end, parts))


def _cudnn_backward(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int,
    wants_weight: bool,
) -> Gradients:  # fmt: skip
    stored = gradient.stored()
    forms = cudnn_forms.input_gradient(stored, weight, end, stride)
    key = _key("cudnn input", gradient, weight, stride, end.describe())
    dz, factors = forms[choose(key, forms, stored.device)]()
    found = _stored_weight_gradient(stored, weight, inputs, stride) if wants_weight else None
    return Gradients(dz, found, factors)


def _stored_weight_gradient(
    gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> Tensor:
    forms = cudnn_forms.weight_gradient(gradient, weight, inputs, stride)
    if not forms:
        return _torch_weight_gradient(gradient, weight, inputs, stride)
    forms[SEPARATE] = partial(_torch_weight_gradient, gradient, weight, inputs, stride)
    key = _key("cudnn weight", inputs, weight, stride)
    return forms[choose(key, forms, gradient.device)]()


def _torch_weight_gradient(
    gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> Tensor:
    _, found = _torch_backward(gradient, inputs.stored(), weight, stride, (False, True))
    assert found is not None
    return found
