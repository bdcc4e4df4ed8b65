"""Convolutions of a fused block with what is around them: forward, and both gradients.

Each has several forms: the kernels of `product_launches`, one for each tile, for 1 × 1 convolutions of
stride 1; where asked for, kernels of cuDNN (`cudnn_forms`), in fp16; and the separate one, the norm's
kernels around a convolution of torch. All give the same values within rounding; `product_choice` times
them and keeps the fastest one for each shape and device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel import cudnn_forms
from paceline.accel.cudnn_graphs import CudnnError
from paceline.accel.fused import (
    Moments,
    as_map,
    check_rows,
    gradient_sums,
    join_moments,
    moments,
)
from paceline.accel.operands import (
    FORMS,
    MOMENTS,
    NORMALIZED,
    PLAIN,
    Epilogue,
    Gradients,
    Operand,
    out_dims,
)
from paceline.accel.product_choice import CUDNN, SEPARATE, Choices
from paceline.accel.product_launches import (
    launch_both_gradients,
    launch_product,
    launch_weight_gradient,
    resident_programs,
)
from paceline.accel.product_tiles import (
    BOTH_TILES,
    TILES,
    WEIGHT_TILES,
    Tile,
    both_fits,
    fits,
    weight_fits,
)


def _key(what: str, operand: Operand, weight: Tensor, stride: int, *more: object) -> str:
    out, into, size, _ = weight.shape
    form = FORMS[operand.form] + (" relu" if operand.relu else "")
    kind = str(weight.dtype).removeprefix("torch.")
    height, width = operand.x.shape[2:]
    window = "" if size == stride == 1 else f"{size}/{stride} {height}x{width}"
    words = [f"{what} {operand.rows}x{into}x{out} {kind} {form}", window, *map(str, more)]
    return " ".join(filter(None, words))


def is_product(weight: Tensor, stride: int) -> bool:
    """Whether the convolution is a product of matrices of rows × channels."""
    return stride == 1 and tuple(weight.shape[2:]) == (1, 1)


def forward_product(
    choices: Choices, operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, stride: int = 1, *,
    keep: bool = False, recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The convolution, the statistics of `norm` on it (see `fused.statistics`), which updates the
    running ones, and the stored operand if `keep`, else where there is one and not `recompute`. The
    padding is half the size of the weight."""
    check_rows(out_dims(tuple(operand.x.shape), tuple(weight.shape), stride))
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {
        tile.name: partial(_fused_forward, operand, weight, norm, tile, keep)
        for tile in (TILES if is_product(weight, stride) else ())
        if fits(tile, into, out, reads=False, sums=True)
        and resident_programs(tile, operand, Epilogue.plain(operand.x))
    }
    cudnn = choices.mode == CUDNN
    # Only cuDNN's times depend on what is kept for backward.
    how = "kept" if keep else "recomputed" if recompute and cudnn else ""
    key = _key("forward", operand, weight, stride, how)
    forms.update(
        _of_cudnn(choices, key, partial(cudnn_forms.forward, operand, weight, stride, keep))
    )
    then = None
    if cudnn and operand.form == NORMALIZED:
        # A form that does not store the operand leaves more to the weight's gradient.
        then = partial(_weight_gradient_after, choices, operand, weight, stride, recompute)
    forms[SEPARATE] = partial(_separate_forward, operand, weight, stride)
    found, sums, kept = _fastest(
        choices, key, forms, is_product(weight, stride), operand.x.device, then
    )
    halves = cudnn and weight.dtype == torch.float16
    return found, join_moments(sums, norm, halves=halves), None if recompute else kept


Result = TypeVar("Result")


def _of_cudnn(
    choices: Choices, key: str, make: Callable[[str], dict[str, Callable[[], Result]]]
) -> dict[str, Callable[[], Result]]:
    """Forms of cuDNN where the run asks for them. Why there are none is part of `Choices.describe`."""
    wanted = choices.wanted_of_cudnn(key)
    if wanted is None:
        return {}
    try:
        return make(wanted)
    except CudnnError as error:
        choices.missing[key] = str(error)
        return {}


def _fastest(
    choices: Choices, key: str, forms: dict[str, Callable[[], Result]], product: bool,
    device: torch.device, then: Callable[[Result], object] | None = None,
) -> Result:  # fmt: skip
    """The result of the fastest form. Where only cuDNN could have others, and has none, there is nothing
    to choose; a choice of an earlier run counts as used."""
    if not product and len(forms) == 1 and key not in choices.chosen:
        return forms[SEPARATE]()
    return forms[choices.choose(key, forms, device, then)]()


def _weight_gradient_after(
    choices: Choices, operand: Operand, weight: Tensor, stride: int, recompute: bool,
    found: tuple[Tensor, Moments, Tensor | None],
) -> Tensor:  # fmt: skip
    """For its time: the output is in the place of its gradient."""
    out, _, kept = found
    inputs = operand if kept is None or recompute else Operand(kept)
    return _stored_weight_gradient(choices, out, weight, inputs, stride)


def _fused_forward(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, tile: Tile, keep: bool
) -> tuple[Tensor, Moments, Tensor | None]:
    out, sums, kept = launch_product(
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
    choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue,
    stride: int = 1, *, wants_weight: bool,
) -> Gradients:  # fmt: skip
    """Both gradients of a convolution of `inputs`.

    Either each product computes the gradient of the convolution's output for itself, or, with few
    channels, one kernel gives both, or that gradient is stored for kernels of cuDNN or of torch. (That
    the first product stores it for the second was slower than all of these.)
    """
    forms: dict[str, Callable[[], Gradients]] = {}
    given = (gradient, weight, inputs, end, stride, wants_weight)
    if is_product(weight, stride):
        forms["fused"] = partial(_fused_backward, choices, *given)
    forms[SEPARATE] = partial(_separate_backward, *given)
    if wants_weight and is_product(weight, stride):
        for tile in BOTH_TILES:
            if both_fits(tile, weight.shape[1], weight.shape[0]):
                forms[f"both {tile.name}"] = partial(
                    launch_both_gradients, gradient, weight, inputs, end, tile
                )
    key = _key(
        "backward", gradient, weight, stride, end.describe(), FORMS[inputs.form], wants_weight
    )
    if end.form != PLAIN:
        forms.update(_of_cudnn(choices, key, partial(_cudnn_backward_forms, choices, *given)))
    return _fastest(choices, key, forms, is_product(weight, stride), gradient.x.device)


def _fused_backward(
    choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int,
    wants_weight: bool,
) -> Gradients:  # fmt: skip
    dx, parts = input_gradient(choices, gradient, weight, end)
    found = weight_gradient(choices, gradient, weight, inputs) if wants_weight else None
    return Gradients(dx, parts, found)


def input_gradient(
    choices: Choices, gradient: Operand, weight: Tensor, end: Epilogue
) -> tuple[Tensor, Tensor | None]:
    """gradient · weight behind `end`, and its partial sums."""
    out, into = weight.shape[:2]
    launch = partial(launch_product, forward=False, epilogue=end.form, side=False, end=end)
    forms: dict[str, Callable[[], tuple[Tensor, Tensor | None, Tensor | None]]] = {
        tile.name: partial(launch, gradient, weight, tile)
        for tile in TILES
        if fits(tile, out, into, reads=bool(end.maps()), sums=end.form != PLAIN)
        and resident_programs(tile, gradient, end)
    }
    key = _key("input", gradient, weight, 1, end.describe())
    dx, parts, _ = forms[choices.choose(key, forms, gradient.x.device)]()
    return dx, parts


def weight_gradient(choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand) -> Tensor:
    """gradientᵀ · inputs, in the shape of `weight`."""
    out, into = weight.shape[:2]
    forms: dict[str, Callable[[], Tensor]] = {
        tile.name: partial(launch_weight_gradient, gradient, weight, inputs, tile)
        for tile in WEIGHT_TILES
        if weight_fits(tile, into, out)
    }
    key = _key("weight", gradient, weight, 1, FORMS[inputs.form])
    return forms[choices.choose(key, forms, gradient.x.device)]()


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
        return Gradients(dx, None, found)
    parts, dz = gradient_sums(dx, end.add, end.branch.x, end.y, end.branch.saved, relu=True)
    dz = dx if dz is None else dz
    if end.shortcut is not None:
        more, _ = gradient_sums(dz, None, end.shortcut.x, None, end.shortcut.saved, relu=False)
        parts = torch.cat((parts, more))
    return Gradients(dz, parts, found)


def _cudnn_backward_forms(
    choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int,
    wants_weight: bool, wanted: str,
) -> dict[str, Callable[[], Gradients]]:  # fmt: skip
    """One form; its two gradients have several each."""
    # In the place of the gradient's map, which is not stored yet: the same shape and memory.
    key, chosen = _cudnn_input_key(gradient, weight, end, stride), ""
    if wanted:
        chosen = choices.wanted_of_cudnn(key) or ""
    cudnn_forms.input_gradient(gradient.x, weight, end, stride, chosen)
    call = partial(_cudnn_backward, choices, gradient, weight, inputs, end, stride, wants_weight)
    return {CUDNN: call}


def _cudnn_input_key(gradient: Operand, weight: Tensor, end: Epilogue, stride: int) -> str:
    add = "" if end.add is None else "add"
    return _key(f"{CUDNN} input", gradient, weight, stride, end.describe(), add)


def _cudnn_backward(
    choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue, stride: int,
    wants_weight: bool,
) -> Gradients:  # fmt: skip
    stored = gradient.stored()
    key = _cudnn_input_key(gradient, weight, end, stride)
    wanted = choices.wanted_of_cudnn(key) or ""
    forms = cudnn_forms.input_gradient(stored, weight, end, stride, wanted)
    dz, factors = forms[choices.choose(key, forms, stored.device)]()
    found = None
    if wants_weight:
        found = _stored_weight_gradient(choices, stored, weight, inputs, stride)
    return Gradients(dz, None, found, factors)


def _stored_weight_gradient(
    choices: Choices, gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> Tensor:
    separate = partial(_torch_weight_gradient, gradient, weight, inputs, stride)
    if inputs.form != NORMALIZED:
        return separate()
    key = _key(f"{CUDNN} weight", inputs, weight, stride)
    forms = _of_cudnn(
        choices, key, partial(cudnn_forms.weight_gradient, gradient, weight, inputs, stride)
    )
    forms[SEPARATE] = separate
    return _fastest(choices, key, forms, False, gradient.device)


def _torch_weight_gradient(
    gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> Tensor:
    _, found = _torch_backward(gradient, inputs.stored(), weight, stride, (False, True))
    assert found is not None
    return found
