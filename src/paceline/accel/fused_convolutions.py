"""Convolutions fused with the batch norms and ReLUs around them, forward and backward.

Each convolution and gradient has several implementations with equal results within rounding. Those
for 1 × 1 convolutions of stride 1 are the kernels of `convolution_launches`, one for each tile. If
requested, there are kernels of cuDNN in fp16 (`cudnn_forms`). The separate implementation uses
torch's convolution and the kernels of norms. `implementation_choice` times them and keeps the
fastest for each shape and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel import cudnn_forms
from paceline.accel.convolution_launches import (
    launch_both_gradients,
    launch_convolution,
    launch_weight_gradient,
    resident_programs,
)
from paceline.accel.convolution_tiles import (
    BOTH_TILES,
    TILES,
    WEIGHT_TILES,
    Tile,
    both_fits,
    fits,
    weight_fits,
)
from paceline.accel.cudnn_graphs import CudnnError
from paceline.accel.fused import (
    Moments,
    channels_last,
    check_rows,
    gradient_sums,
    join_moments,
    moments,
)
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices
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


def _key(what: str, operand: Operand, weight: Tensor, stride: int, *more: object) -> str:
    """Returns the key under which the choice of a kernel is stored.

    The key contains everything that affects the time, such as shapes and number format.
    """
    out, into, size, _ = weight.shape
    form = FORMS[operand.form] + (" relu" if operand.relu else "")
    kind = str(weight.dtype).removeprefix("torch.")
    height, width = operand.x.shape[2:]
    window = "" if size == stride == 1 else f"{size}/{stride} {height}x{width}"
    words = [f"{what} {operand.rows}x{into}x{out} {kind} {form}", window, *map(str, more)]
    return " ".join(filter(None, words))


def is_matrix_product(weight: Tensor, stride: int) -> bool:
    """Returns True for a 1 × 1 convolution of stride 1, which is a product of two matrices."""
    return stride == 1 and tuple(weight.shape[2:]) == (1, 1)


def forward_convolution(
    choices: Choices, operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, stride: int = 1, *,
    keep: bool = False, recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes a convolution and the statistics of its output; the padding is half the kernel size.

    Args:
        choices: The kernels chosen for the convolutions.
        operand: The input.
        weight: The weight of the convolution.
        norm: The norm that follows, whose running statistics are updated.
        stride: The stride of the convolution.
        keep: True to store the computed input.
        recompute: True if the backward pass recomputes the input.

    Returns:
        The output, the statistics of the output (see `fused.statistics`), and the input if it is
        stored and `recompute` is False, else None.
    """
    check_rows(out_dims(tuple(operand.x.shape), tuple(weight.shape), stride))
    out, into = weight.shape[:2]
    implementations: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {
        tile.name: partial(_fused_forward, operand, weight, norm, tile, keep)
        for tile in (TILES if is_matrix_product(weight, stride) else ())
        if fits(tile, into, out, reads=False, sums=True)
        and resident_programs(tile, operand, Epilogue.plain(operand.x))
    }
    cudnn = choices.mode == CUDNN
    # Only with cuDNN does the choice depend on what is saved for the backward pass.
    how = "kept" if keep else "recomputed" if recompute and cudnn else ""
    key = _key("forward", operand, weight, stride, how)
    implementations |= _of_cudnn(
        choices, key, partial(cudnn_forms.forward, operand, weight, stride, keep)
    )

    def weight_gradient_after(result: tuple[Tensor, Moments, Tensor | None]) -> Tensor:
        """Computes a weight gradient for timing only; the output serves as its own gradient."""
        out, _, kept = result
        inputs = operand if kept is None or recompute else Operand(kept)
        return _stored_weight_gradient(choices, out, weight, inputs, stride)

    # If an implementation does not store the input, the weight gradient takes longer, which is
    # timed.
    then = weight_gradient_after if cudnn and operand.form == NORMALIZED else None
    implementations[SEPARATE] = partial(_separate_forward, operand, weight, stride)
    result, sums, kept = _fastest(
        choices, key, implementations, is_matrix_product(weight, stride), operand.x.device, then
    )
    halves = cudnn and weight.dtype == torch.float16
    return result, join_moments(sums, norm, halves=halves), None if recompute else kept


Result = TypeVar("Result")


def _of_cudnn(
    choices: Choices, key: str, make: Callable[[str], dict[str, Callable[[], Result]]]
) -> dict[str, Callable[[], Result]]:
    """Returns cuDNN's implementations if the user requests them, and records if there are none.

    `make("")` creates all of them, and `make(name)` only the named one.
    """
    wanted = choices.wanted_of_cudnn(key)
    if wanted is None:
        return {}
    try:
        return make(wanted)
    except CudnnError as error:
        choices.missing[key] = str(error)
        return {}


def _fastest(
    choices: Choices, key: str, implementations: Mapping[str, Callable[[], Result]], product: bool,
    device: torch.device, then: Callable[[Result], object] | None = None,
) -> Result:  # fmt: skip
    """Calls the fastest implementation of a convolution and returns its result.

    If there is only the separate implementation, it is called without a choice, unless the
    convolution is a matrix product (`product`) or a choice is recorded for the key.
    """
    if not product and len(implementations) == 1 and key not in choices.chosen:
        return implementations[SEPARATE]()
    return implementations[choices.choose(key, implementations, device, then)]()


def _fused_forward(
    operand: Operand, weight: Tensor, norm: nn.BatchNorm2d, tile: Tile, keep: bool
) -> tuple[Tensor, Moments, Tensor | None]:
    out, sums, kept = launch_convolution(
        operand, weight, tile, forward=True, epilogue=MOMENTS, side=keep, centre=norm.running_mean
    )
    assert sums is not None
    return out, Moments(sums, operand.rows), kept


def _separate_forward(
    operand: Operand, weight: Tensor, stride: int
) -> tuple[Tensor, Moments, Tensor | None]:
    stored = operand.stored()
    out = channels_last(F.conv2d(stored, weight, None, stride, _padding(weight)))
    return out, moments(out), stored


def _padding(weight: Tensor) -> tuple[int, int]:
    return weight.shape[2] // 2, weight.shape[3] // 2


def backward_convolution(
    choices: Choices, gradient: Operand, weight: Tensor, inputs: Operand, end: Epilogue,
    stride: int = 1, *, wants_weight: bool,
) -> Gradients:  # fmt: skip
    """Computes the gradients of a convolution's input and weight.

    There are three implementations. Two kernels each recompute the gradient of the output while
    they load their operands; one kernel computes both gradients, if there are few channels; or the
    gradient of the output is stored for kernels of cuDNN or torch. Storing this gradient in one
    kernel for the second kernel was slower.

    Args:
        choices: The kernels chosen for the convolutions.
        gradient: The gradient of the convolution's output.
        weight: The weight of the convolution.
        inputs: The input of the convolution.
        end: The operations that are applied to the gradient of the input.
        stride: The stride of the convolution.
        wants_weight: True if the gradient of the weight is needed.
    """
    return _Backward(choices, gradient, weight, inputs, end, stride, wants_weight).fastest()


@dataclass(frozen=True)
class _Backward:
    """The arguments of `backward_convolution`; each method is one implementation."""

    choices: Choices
    gradient: Operand
    weight: Tensor
    inputs: Operand
    end: Epilogue
    stride: int
    wants_weight: bool

    def fastest(self) -> Gradients:
        product, form = is_matrix_product(self.weight, self.stride), FORMS[self.inputs.form]
        implementations: dict[str, Callable[[], Gradients]] = {}
        if product:
            implementations["fused"] = self.fused
        implementations[SEPARATE] = self.separate
        if product and self.wants_weight:
            out, into = self.weight.shape[:2]
            implementations |= {
                f"both {tile.name}": partial(
                    launch_both_gradients, self.gradient, self.weight, self.inputs, self.end, tile
                )
                for tile in BOTH_TILES
                if both_fits(tile, into, out)
            }
        key = self.key("backward", form, self.wants_weight)
        if self.end.form != PLAIN:
            implementations |= _of_cudnn(self.choices, key, self.of_cudnn)
        return _fastest(self.choices, key, implementations, product, self.gradient.x.device)

    def key(self, what: str, *more: object) -> str:
        return _key(what, self.gradient, self.weight, self.stride, self.end.describe(), *more)

    def fused(self) -> Gradients:
        dx, parts = self.fused_input()
        return Gradients(dx, parts, self.fused_weight() if self.wants_weight else None)

    def fused_input(self) -> tuple[Tensor, Tensor | None]:
        """Computes the gradient of the input and applies `end`. Returns it with the partial sums."""
        (out, into), end = self.weight.shape[:2], self.end
        launch = partial(launch_convolution, forward=False, epilogue=end.form, side=False, end=end)
        implementations = {
            tile.name: partial(launch, self.gradient, self.weight, tile)
            for tile in TILES
            if fits(tile, out, into, reads=bool(end.maps()), sums=end.form != PLAIN)
            and resident_programs(tile, self.gradient, end)
        }
        device = self.weight.device
        dx, parts, _ = _fastest(self.choices, self.key("input"), implementations, True, device)
        return dx, parts

    def fused_weight(self) -> Tensor:
        """Computes the gradient of the weight."""
        out, into = self.weight.shape[:2]
        implementations = {
            tile.name: partial(
                launch_weight_gradient, self.gradient, self.weight, self.inputs, tile
            )
            for tile in WEIGHT_TILES
            if weight_fits(tile, into, out)
        }
        key = _key("weight", self.gradient, self.weight, 1, FORMS[self.inputs.form])
        return _fastest(self.choices, key, implementations, True, self.weight.device)

    def separate(self) -> Gradients:
        stored, end = self.gradient.stored(), self.end
        # Without the weight's gradient, torch needs only the shape of the input.
        source = self.inputs.stored() if self.wants_weight else end.like
        dx, dw = _torch_backward(
            stored, source, self.weight, self.stride, (True, self.wants_weight)
        )
        assert dx is not None
        dx = channels_last(dx)
        if end.branch is None:
            return Gradients(dx, None, dw)
        parts, dz = gradient_sums(dx, end.add, end.branch.x, end.y, end.branch.saved, relu=True)
        dz = dx if dz is None else dz
        if end.shortcut is not None:
            more, _ = gradient_sums(dz, None, end.shortcut.x, None, end.shortcut.saved, relu=False)
            parts = torch.cat((parts, more))
        return Gradients(dz, parts, dw)

    def of_cudnn(self, wanted: str) -> dict[str, Callable[[], Gradients]]:
        """Returns an implementation by cuDNN, which chooses a kernel for each gradient separately.

        Raises `CudnnError` if cuDNN does not support the gradient of the input.
        """
        # The gradient is not stored yet; `gradient.x` has the same shape and layout.
        self.cudnn_inputs(self.gradient.x, timed=not wanted)
        return {CUDNN: self.cudnn}

    def cudnn_inputs(
        self, gradient: Tensor, *, timed: bool
    ) -> dict[str, Callable[[], tuple[Tensor, tuple[Tensor, ...]]]]:
        """Returns implementations of the input's gradient: all if `timed`, else only the chosen one."""
        chosen = "" if timed else self.choices.wanted_of_cudnn(self.cudnn_key()) or ""
        return cudnn_forms.input_gradient(gradient, self.weight, self.end, self.stride, chosen)

    def cudnn_key(self) -> str:
        return self.key(f"{CUDNN} input", "" if self.end.add is None else "add")

    def cudnn(self) -> Gradients:
        stored = self.gradient.stored()
        dz, factors = _fastest(
            self.choices, self.cudnn_key(), self.cudnn_inputs(stored, timed=False), True,
            stored.device,
        )  # fmt: skip
        dw = None
        if self.wants_weight:
            dw = _stored_weight_gradient(
                self.choices, stored, self.weight, self.inputs, self.stride
            )
        return Gradients(dz, None, dw, factors)


def _torch_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, stride: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (
        torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, [stride, stride], [*_padding(weight)], [1, 1], False,
            [0, 0], 1, [*wanted, False],
        )
    )  # fmt: skip
    return gradients[0], gradients[1]


def _stored_weight_gradient(
    choices: Choices, gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> Tensor:
    def separate() -> Tensor:
        _, dw = _torch_backward(gradient, inputs.stored(), weight, stride, (False, True))
        assert dw is not None
        return dw

    if inputs.form != NORMALIZED:
        return separate()
    key = _key(f"{CUDNN} weight", inputs, weight, stride)
    implementations = _of_cudnn(
        choices, key, partial(cudnn_forms.weight_gradient, gradient, weight, inputs, stride)
    )
    implementations[SEPARATE] = separate
    return _fastest(choices, key, implementations, False, gradient.device)
