"""1 × 1 convolutions of stride 1 with what is around them: forward, and both gradients.

Each of them has a fused form, one of the `TILES` of `product_kernels`, and a separate one: the norm's
kernels around a convolution of torch. Both give the same values within rounding; `product_choice`
times them and keeps the faster one for each shape and device.

Maps are in channels-last memory, in half precision on a GPU. An `Operand` is a map that a fused product
computes while it loads it, and `Operand.stored` the same map in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.models import product_kernels as kernels
from paceline.models.fused import (
    Moments,
    apply,
    as_map,
    backward_input,
    gradient_sums,
    join_moments,
    join_sums,
    moments,
)
from paceline.models.product_choice import SEPARATE, choices, choose
from paceline.models.product_tiles import (
    BOTH_TILES,
    TILES,
    WEIGHT_TILES,
    Tile,
    both_fits,
    fits,
    weight_fits,
)

PLAIN, NORMALIZED, JOINED, GRADIENT, MOMENTS, MASKED, MERGED, PROJECTED = range(8)
_FORMS = (
    "plain", "normalized", "joined", "gradient", "moments", "masked", "merged", "projected",
)  # fmt: skip
# Offsets inside a part are counted in 32 bits.
_MOST_ELEMENTS = 2**31 - 1
# Parts and elements per program that adds up partial products.
_JOIN_PARTS, _JOIN_ELEMENTS = 32, 64
# Without a GPU, in Triton's interpreter.
_INTERPRETED_PROCESSORS = 3


@dataclass(frozen=True)
class Operand:
    """A map as stored, or what `form` computes from `x`, `other` and statistics."""

    x: Tensor
    form: int = PLAIN
    other: Tensor | None = None
    saved: Tensor | None = None
    found: Tensor | None = None
    relu: bool = False

    @classmethod
    def normalized(cls, x: Tensor, saved: Tensor) -> Operand:
        """relu(norm(x))."""
        return cls(x, NORMALIZED, saved=saved)

    @classmethod
    def joined(
        cls, x: Tensor, saved: Tensor, residual: Tensor, residual_saved: Tensor | None = None
    ) -> Operand:
        """relu(norm(x) + residual), or + norm(residual) where its statistics are given."""
        form = JOINED if residual_saved is None else PROJECTED
        return cls(x, form, residual, saved, residual_saved)

    @classmethod
    def gradient(
        cls, dz: Tensor, x: Tensor, saved: Tensor, found: Tensor, *, relu: bool
    ) -> Operand:
        """The gradient of a norm's input `x`; with `relu`, `dz` is the one behind its ReLU."""
        return cls(dz, GRADIENT, x, saved, found, relu)

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[1]

    def stored(self) -> Tensor:
        if self.form == PLAIN:
            return self.x
        assert self.saved is not None
        if self.form == GRADIENT:
            assert self.other is not None
            assert self.found is not None
            return backward_input(self.x, None, self.other, self.saved, self.found, self.relu)
        residual = self.other
        if self.form == PROJECTED:
            assert residual is not None
            assert self.found is not None
            residual = apply(residual, self.found, None, relu=False)
        return apply(self.x, self.saved, residual, relu=True)


@dataclass(frozen=True)
class Epilogue:
    """Where a gradient goes behind the product: `MASKED`, through the ReLU of a norm of `x`;
    `MERGED`, through sum and ReLU of a block with output `y`, `add` being the gradient of the output's
    other use; `PLAIN`, nowhere. `x` is the norm's input with statistics `saved`, or, for `PLAIN`, any
    map of the result's shape. `other` is a normalized residual's, likewise."""

    form: int
    x: Tensor
    saved: Tensor | None = None
    y: Tensor | None = None
    add: Tensor | None = None
    other: Tensor | None = None
    other_saved: Tensor | None = None

    def maps(self) -> list[Tensor]:
        """What the product reads behind it."""
        given = (self.x, self.y, self.add, self.other)
        return [] if self.form == PLAIN else [each for each in given if each is not None]

    def describe(self) -> str:
        return _FORMS[self.form] + ("" if self.other is None else " projected")


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


def _resident(tile: Tile, operand: Operand, end: Epilogue) -> int:
    k, maps = operand.x.shape[1], 1 if operand.other is None else 2
    return tile.resident(k, inputs=maps, computed=operand.form != PLAIN, ends=len(end.maps()))


def _run(kernel: Any, programs: int, *given: object, **options: object) -> None:
    if choices.building:
        kernel.warmup(*given, grid=(programs,), **options)
    else:
        kernel[(programs,)](*given, **options)


def _launch(
    operand: Operand, weight: Tensor, tile: Tile, *, forward: bool, epilogue: int, side: bool,
    centre: Tensor | None = None, end: Epilogue | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The product, sums of its epilogue, and the operand if `side`."""
    x, rows = operand.x, operand.rows
    images, k, height, width = x.shape
    n = weight.shape[0] if forward else weight.shape[1]
    blocks = -(-n // tile.block_n)
    end = end or Epilogue(PLAIN, x)
    programs = max(_resident(tile, operand, end), 1) * _processors(x.device)
    span = _span(rows, max(k, n), tile.block_m, programs // blocks)
    parts = -(-rows // span)
    out = torch.empty(
        (images, n, height, width), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    sums, project = None, end.other is not None
    if epilogue != PLAIN:
        sums = torch.empty((4 if project else 2, parts, n), dtype=torch.float32, device=x.device)
    kept = torch.empty_like(x) if side else None
    single = k <= tile.block_k
    maps, described = _maps(tile, tile.block_n, out, end)
    groups, lines = tile.rows(tile.block_n)
    _run(
        kernels.product_kernel, parts * blocks,
        x, _or(operand.other, x), _or(operand.saved, x), _or(operand.found, x), _or(kept, x), weight,
        *maps, _or(end.saved, x), _or(end.other_saved, x), _or(centre, x), _or(sums, x), rows, span,
        k, n,
        FORM=operand.form, RELU=operand.relu, SIDE=side, FORWARD=forward, EPILOGUE=epilogue,
        ADD=end.add is not None, PROJECT=project, SINGLE=single, EVEN_K=k % tile.block_k == 0,
        EVEN_N=n % tile.block_n == 0, STAGES=tile.stages, TURNED=tile.turned, DESCRIBED=described,
        GROUPS=groups, LINES=lines, EVEN_M=rows % tile.block_m == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, sums, kept


def _maps(
    tile: Tile, block: int, out: Tensor, end: Epilogue
) -> tuple[list[Tensor | TensorDescriptor], bool]:
    """What an epilogue stores and reads, `block` columns at a time, and whether as descriptors: those of
    Hopper's copy engine, which need rows of whole 16 bytes."""
    n = out.shape[1]
    maps = (out, end.x, end.y, end.add, end.other)
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
    """A kernel takes some pointer also where it reads nothing."""
    return unused if tensor is None else tensor


def _key(what: str, operand: Operand, weight: Tensor, *more: object) -> str:
    out, into = weight.shape[:2]
    form = _FORMS[operand.form] + (" relu" if operand.relu else "")
    kind = str(weight.dtype).removeprefix("torch.")
    words = [f"{what} {operand.rows}x{into}x{out} {kind} {form}", *map(str, more)]
    return " ".join(filter(None, words))


def forward_product(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The convolution, the statistics of `norm` on it (see `fused.statistics`), which updates the
    running ones, and the stored operand if `keep`."""
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {
        tile.name: partial(_fused_forward, operand, weight, norm, tile, keep)
        for tile in TILES
        if fits(tile, into, out, reads=False, sums=True)
        and _resident(tile, operand, Epilogue(PLAIN, operand.x))
    }
    forms[SEPARATE] = partial(_separate_forward, operand, weight)
    name = choose(_key("forward", operand, weight, "kept" if keep else ""), forms, operand.x.device)
    found, sums, kept = forms[name]()
    return found, join_moments(sums, norm), kept


def _fused_forward(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, tile: Tile, keep: bool
) -> tuple[Tensor, Moments, Tensor | None]:
    out, sums, kept = _launch(
        operand, weight, tile, forward=True, epilogue=MOMENTS, side=keep, centre=norm.running_mean
    )
    assert sums is not None
    return out, Moments(sums, operand.rows), kept


def _separate_forward(operand: Operand, weight: Tensor) -> tuple[Tensor, Moments, Tensor | None]:
    stored = operand.stored()
    out = as_map(F.conv2d(stored, weight))
    return out, moments(out), stored


@dataclass(frozen=True)
class Gradients:
    """`dx` behind the epilogue, its partial sums, and the weight's gradient where it is wanted."""

    dx: Tensor
    parts: Tensor | None
    weight: Tensor | None

    def factors(self, gamma: Tensor, saved: Tensor, *, other: bool = False) -> Tensor:
        """The rows of `fused.join_sums`, of the norm or of that of a residual."""
        assert self.parts is not None
        parts = self.parts[2:] if other else self.parts[:2]
        return join_sums(parts, gamma, saved, self.dx.numel() // self.dx.shape[1])


def backward_product(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, *, wants_weight: bool
) -> Gradients:
    """Both gradients of a convolution of `inputs`.

    Either each product computes the gradient of the convolution's output for itself, or, with few
    channels, one kernel gives both, or separate kernels store that gradient for those of torch. (That
    the first product stores it for the second was slower than all of these.)
    """
    forms: dict[str, Callable[[], Gradients]] = {
        "fused": partial(_fused_backward, gradient, weight, inputs, end, wants_weight),
        SEPARATE: partial(_separate_backward, gradient, weight, inputs, end, wants_weight),
    }
    if wants_weight:
        for tile in BOTH_TILES:
            if both_fits(tile, weight.shape[1], weight.shape[0]):
                forms[f"both {tile.name}"] = partial(
                    _both_gradients, gradient, weight, inputs, end, tile
                )
    key = _key("backward", gradient, weight, end.describe(), _FORMS[inputs.form], wants_weight)
    return forms[choose(key, forms, gradient.x.device)]()


def _fused_backward(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, wants_weight: bool
) -> Gradients:
    dx, parts = input_gradient(gradient, weight, end)
    return Gradients(dx, parts, weight_gradient(gradient, weight, inputs) if wants_weight else None)


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
        if fits(tile, out, into, reads=bool(end.maps()), sums=end.form != PLAIN)
        and _resident(tile, gradient, end)
    }
    key = _key("input", gradient, weight, end.describe())
    dx, parts, _ = forms[choose(key, forms, gradient.x.device)]()
    return dx, parts


def weight_gradient(gradient: Operand, weight: Tensor, inputs: Operand) -> Tensor:
    """gradientᵀ · inputs, in the shape of `weight`."""
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], Tensor]] = {
        tile.name: partial(_fused_weight, gradient, weight, inputs, tile)
        for tile in WEIGHT_TILES
        if weight_fits(tile, into, out)
    }
    key = _key("weight", gradient, weight, _FORMS[inputs.form])
    return forms[choose(key, forms, gradient.x.device)]()


def _fused_weight(gradient: Operand, weight: Tensor, inputs: Operand, tile: Tile) -> Tensor:
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


def _join_products(partial_products: Tensor, weight: Tensor) -> Tensor:
    found = torch.empty_like(weight)
    _run(
        kernels.join_products_kernel, -(-weight.numel() // _JOIN_ELEMENTS),
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
    x, source, project = gradient.x, inputs.x, end.other is not None
    assert end.form != MERGED or source is end.y
    dx = torch.empty_like(end.x)
    sums = None
    if end.form != PLAIN:
        sums = torch.empty((4 if project else 2, parts, into), dtype=torch.float32, device=x.device)
    partial_products = torch.empty((parts, out, into), dtype=torch.float32, device=x.device)
    maps, described = _maps(tile, tile.block_k, dx, end)
    groups, lines = tile.rows(tile.block_k)
    _run(
        kernels.both_gradients_kernel, parts,
        x, _or(gradient.other, x), _or(gradient.saved, x), _or(gradient.found, x), weight,
        source, _or(inputs.saved, source), *maps, _or(end.saved, x), _or(end.other_saved, x),
        _or(sums, x), partial_products, rows, span, out, into,
        FORM=gradient.form, RELU=gradient.relu, INPUT_FORM=inputs.form, EPILOGUE=end.form,
        ADD=end.add is not None, PROJECT=project, STAGES=tile.stages,
        TURNED=tile.turned, DESCRIBED=described, GROUPS=groups, LINES=lines,
        # Without masks, the compiler does not load the gradient of other tiles ahead.
        EVEN_M=tile.turned and rows % tile.block_m == 0,
        EVEN=out == tile.block_n and into == tile.block_k,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return Gradients(dx, sums, _join_products(partial_products, weight))


def _torch_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = (
        torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [*wanted, False],
        )
    )  # fmt: skip
    return found[0], found[1]


def _separate_backward(
    gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, wants_weight: bool
) -> Gradients:
    stored = gradient.stored()
    # The gradient of the input needs only the shape of the input.
    source = inputs.stored() if wants_weight else end.x
    dx, found = _torch_backward(stored, source, weight, (True, wants_weight))
    assert dx is not None
    dx = as_map(dx)
    if end.form == PLAIN:
        return Gradients(dx, None, found)
    assert end.saved is not None
    parts, dz = gradient_sums(dx, end.add, end.x, end.y, end.saved, relu=True)
    dz = dx if dz is None else dz
    if end.other is not None:
        assert end.other_saved is not None
        more, _ = gradient_sums(dz, None, end.other, None, end.other_saved, relu=False)
        parts = torch.cat((parts, more))
    return Gradients(dz, parts, found)
