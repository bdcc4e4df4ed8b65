"""Residual blocks whose convolutions are fused with the norms around them, as autograd functions.

    conv1 → norm → ReLU → conv2 (3 × 3) → norm → ReLU → conv3 → norm → + shortcut → ReLU
    conv1 (3 × 3) → norm → ReLU → conv2 (3 × 3) → norm → + shortcut → ReLU

Outputs of convolutions are stored. A normalized activation is stored only if the shortcut reads it
or, unless `recompute` is on, if torch computes the convolution that reads it. A block returns a
`DeferredOutput`: conv1 of the next block computes the last norm, sum and ReLU while it loads its
input, and stores the result. In the backward pass, the kernel that computes the gradient of a
normalized activation also applies the sum and the ReLU, and computes the sums for the gradients of
γ and β.

With `recompute`, autograd does not save the output of a block whose shortcut is stored. The
backward pass recomputes the output from the input of the last norm and the shortcut (see
`paceline.accel.recompute`).

The gradient of a convolution's output x is a · dz + b · x + c (see
`kernels.backward_factors_kernel`), where dz is the gradient of the following norm's output.
Autograd passes dz instead of this gradient, and `Link` passes the factors a, b and c to the
backward pass of the convolution. Therefore exactly one operation may read each normalized
activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.accel.fused import (
    backward_sums,
    can_fuse,
    channels_last,
    norm_can_fuse,
    two_gradients,
)
from paceline.accel.fused_convolutions import backward_convolution, forward_convolution
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.accel.networks import Block, Pair
from paceline.accel.operands import Epilogue, NormedMap, Operand
from paceline.accel.recompute import (
    ActivationSource,
    BlockInput,
    RecomputedActivation,
    branch_and_shortcut,
    not_stored,
)
from paceline.accel.stem import is_plain

if TYPE_CHECKING:
    from paceline.accel.fused_forward import FusedForward

_HALF = (torch.float16, torch.bfloat16)


class Link:
    """Passes the factors of a norm's gradient to the convolution before it in the backward pass.

    In the backward pass, the only operation that reads the norm's output calls `put` with the
    factors, and the convolution before the norm calls `take`.
    """

    def __init__(self) -> None:
        self._passed: tuple[int, Tensor] | None = None

    def put(self, dz: Tensor, factors: Tensor) -> None:
        self._passed = (dz.data_ptr(), factors)

    def take(self, dz: Tensor) -> Tensor:
        assert self._passed is not None, "the reader of a normalized activation must be fused"
        address, factors = self._passed
        assert address == dz.data_ptr(), "a normalized activation must have one reader"
        self._passed = None
        return factors


@dataclass
class Normed:
    """The activation norm(x) for the output `x` of a convolution, which is stored in its place."""

    x: Tensor
    saved: Tensor
    norm: nn.BatchNorm2d
    link: Link

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.saved, self.norm.weight, self.norm.bias


@dataclass
class DeferredOutput:
    """The output of a block, relu(norm(x) + shortcut), which the next block computes.

    Attributes:
        branch: The last normalized activation of the branch.
        residual: The shortcut: an activation, or a normalized output of a convolution.
        recompute: True if the output is recomputed in the backward pass, which needs a stored
            shortcut.
    """

    branch: Normed
    residual: Normed | Tensor | RecomputedActivation
    recompute: bool = False

    def output(self) -> tuple[Tensor, Tensor]:
        """Computes the output of the block and returns it twice (see `fused.norm_act_twice`)."""
        out: tuple[Tensor, Tensor] = _Join.apply(  # type: ignore[no-untyped-call]
            self.links(), *self.tensors()
        )
        return out

    def reduced(
        self, convolution: Pair, choices: Choices
    ) -> tuple[Normed, Tensor | RecomputedActivation]:
        """Applies the first convolution of the next block to the output.

        Returns the result of the convolution, and the output, which the next shortcut reads.
        """
        source = ActivationSource() if self.recompute else None
        # Either the output or the shortcut is not stored, never both.
        with not_stored(self.residual) if source is None else source.not_stored():
            out, y = _convolve(self, convolution, choices, source=source)
        assert y is not None
        return out, y if source is None else RecomputedActivation(y, y, source)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns x, statistics, γ and β of the branch's last norm, then the shortcut.

        If the shortcut has a norm, the same four tensors of that norm take its place.
        """
        if isinstance(self.residual, Normed):
            return *self.branch.tensors(), *self.residual.tensors()
        return *self.branch.tensors(), branch_and_shortcut(self.residual)[1]

    def links(self) -> tuple[Link, ...]:
        """Returns the `Link` of the branch's last norm and, if the shortcut has a norm, its `Link`."""
        norms = (self.branch, self.residual)
        return tuple(norm.link for norm in norms if isinstance(norm, Normed))


def can_fuse_block(block: Block, x: BlockInput) -> bool:
    """Returns True if the kernels support the block for the input `x`.

    The norms of the branch must pass `can_fuse`. The weights must have the type of the activation,
    which must be half precision on a GPU.
    """
    maps = x.branch.x if isinstance(x, DeferredOutput) else branch_and_shortcut(x)[0]
    return (maps.dtype in _HALF or not maps.is_cuda) and all(
        can_fuse(maps, norm) and _is_plain(convolution, maps.dtype)
        for convolution, norm in block.branch
    )


def _is_plain(convolution: nn.Module, kind: torch.dtype) -> bool:
    """Returns True for a plain convolution as in ResNets, with weights of type `kind`.

    It has no bias, equal strides, and a padding of half the kernel size.
    """
    if not is_plain(convolution) or convolution.bias is not None:
        return False
    down, across = convolution.kernel_size
    return (
        convolution.weight.dtype == kind
        and convolution.padding == (down // 2, across // 2)
        and convolution.stride[0] == convolution.stride[1]
    )


def fused_block(
    block: Block, x: BlockInput, forward: FusedForward, choices: Choices
) -> DeferredOutput:
    """Computes a block except its last norm, sum and ReLU. Requires `can_fuse_block`.

    Args:
        block: The block.
        x: The input of the block.
        forward: Computes a shortcut that cannot be fused; tells if activations are recomputed.
        choices: The kernels chosen for the convolutions.
    """
    first, *inner = block.branch
    if isinstance(x, DeferredOutput):
        branch, x = x.reduced(first, choices)
    else:
        with not_stored(x):
            branch, _ = _convolve(branch_and_shortcut(x)[0], first, choices)
    for pair in inner:
        relu = pair[1] is not block.last_norm
        branch, _ = _convolve(branch, pair, choices, relu=relu, recompute=forward.recompute)
    stored = block.downsample is None and not isinstance(x, RecomputedActivation)
    residual = _shortcut(block, x, forward, choices)
    return DeferredOutput(branch, residual, recompute=forward.recomputes and stored)


def _shortcut(
    block: Block, x: BlockInput, forward: FusedForward, choices: Choices
) -> Normed | Tensor | RecomputedActivation:
    _, maps = branch_and_shortcut(x)
    if block.downsample is None:
        return x if isinstance(x, RecomputedActivation) else channels_last(maps)
    convolution, norm = block.downsample
    if not norm_can_fuse(norm) or not _is_plain(convolution, maps.dtype):
        return channels_last(forward.shortcut(block, x))
    with not_stored(x):
        return _convolve(maps, block.downsample, choices, relu=False)[0]


@dataclass(frozen=True)
class _Call:
    """The arguments of `_Convolve` that are not tensors.

    Attributes:
        stride: The stride of the convolution.
        norm: The norm of the convolution's output.
        link: Receives the factors of that norm's gradient in the backward pass.
        links: The links of the norms from whose results the input is computed.
        choices: The kernels chosen for the convolutions.
        relu: True if a ReLU follows the norm.
        recompute: True if the backward pass recomputes the input.
    """

    stride: int
    norm: nn.BatchNorm2d
    link: Link
    links: tuple[Link, ...]
    choices: Choices
    relu: bool
    recompute: bool


def _convolve(
    x: Tensor | Normed | DeferredOutput, convolution: Pair, choices: Choices, *, relu: bool = True,
    recompute: bool = False, source: ActivationSource | None = None,
) -> tuple[Normed, Tensor | None]:  # fmt: skip
    """Applies a convolution to an activation, to relu(norm(x)), or to the output of a block.

    Args:
        x: The input: an activation, a `Normed` activation, or the `DeferredOutput` of a block.
        convolution: The convolution and the norm that follows.
        choices: The kernels chosen for the convolutions.
        relu: True if a ReLU follows the norm.
        recompute: True if the backward pass recomputes the input.
        source: If given, recomputes the output of the block in the backward pass, so that it is not
            saved.

    Returns:
        The result of convolution and norm, and the output of the block if `x` is a
        `DeferredOutput`.
    """
    layer, norm = convolution
    assert isinstance(layer, nn.Conv2d)
    links: tuple[Link, ...] = ()
    tensors: tuple[Tensor, ...]
    if isinstance(x, DeferredOutput):
        tensors, links = x.tensors(), x.links()
    elif isinstance(x, Normed):
        tensors, links = x.tensors(), (x.link,)
    else:
        tensors = (x,)
    call = _Call(layer.stride[0], norm, Link(), links, choices, relu, recompute)
    out, saved, y = _Convolve.apply(  # type: ignore[no-untyped-call]
        call, source, layer.weight, *tensors
    )
    return Normed(out, saved, norm, call.link), y


class _Convolve(torch.autograd.Function):
    """A convolution, with the statistics of its output for the norm that follows.

    The given tensors (see `DeferredOutput.tensors`) decide whether the input is x, relu(norm(x)) or
    relu(norm(x) + shortcut). In the last case, `forward` also returns the computed input.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, source: ActivationSource | None, weight: Tensor, x: Tensor,
        saved: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None,
        residual: Tensor | None = None, residual_saved: Tensor | None = None, *residual_norm: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        joined = residual is not None
        if saved is None:
            operand = Operand(x)
        elif residual is None:
            operand = Operand.normalized(x, saved)
        else:
            operand = Operand.joined(x, saved, residual, residual_saved)
        out, out_saved, y = forward_convolution(
            call.choices,
            operand,
            weight,
            call.norm,
            call.stride,
            keep=joined,
            recompute=call.recompute,
        )
        if source is not None:
            assert y is not None
            assert saved is not None
            assert residual is not None
            # Triton's kernels round like `stored`, which therefore reproduces y bit for bit. cuDNN
            # reads the norm's scale in fp16, so y is reproduced within rounding. This suffices for
            # cuDNN, whose sums have no fixed order and whose backward pass computes the ReLU mask
            # with fp32 scales.
            again = Operand.joined(x.detach(), saved, residual.detach())
            source.set(y, again.stored)
        # Only cuDNN reads a stored residual in the backward pass.
        kept = residual if residual_saved is not None or call.choices.mode == CUDNN else None
        # If the computed input y was stored, it is saved, so that the backward pass can read it.
        ctx.save_for_backward(
            weight, out, out_saved, x, saved, gamma, beta, y, kept, residual_saved, *residual_norm
        )
        ctx.call, ctx.joined = call, joined
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out_saved)
        return out, out_saved, y if joined else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, _: Any, dy_shortcut: Tensor | None) -> Any:
        count = len(ctx.needs_input_grad)
        if dz is None:
            return (None,) * count
        weight, out, out_saved, x, saved, gamma, beta, y, residual, *norm = ctx.saved_tensors
        call: _Call = ctx.call
        shortcut = residual if norm[0] is None else NormedMap(residual, *norm)
        inputs, end, norms = Operand(x if y is None else y), Epilogue.plain(x), []
        if saved is not None:
            norms = [NormedMap(x, saved, gamma, beta)]
            if y is None:
                inputs = Operand.normalized(x, saved)
            end = Epilogue.masked(norms[0])
        if ctx.joined:
            add = None if dy_shortcut is None else channels_last(dy_shortcut)
            end = Epilogue.merged(norms[0], y, add, shortcut)
        if isinstance(shortcut, NormedMap):
            norms.append(shortcut)
        gradients = backward_convolution(
            call.choices, Operand.gradient(dz, out, out_saved, call.link.take(dz), relu=call.relu),
            weight, inputs, end, call.stride, wants_weight=ctx.needs_input_grad[2],
        )  # fmt: skip
        # For a separate implementation, the gradients of the previous convolution apply the ReLU
        # mask.
        found = [None, None, gradients.weight]
        for place, (normed, link) in enumerate(zip(norms, call.links, strict=True)):
            factors = gradients.factors(normed, place)
            link.put(gradients.dx, factors)
            found += [gradients.dx, None, factors[0], factors[1]]
        # The gradient of an input, or of a shortcut, that has no norm.
        found += [gradients.dx] * (count > len(found))
        return tuple(found)


class _Join(torch.autograd.Function):
    """Computes and stores relu(norm(x) + shortcut) if no fused block follows.

    The arguments of `forward` after `links` are `DeferredOutput.tensors`.
    """

    @staticmethod
    def forward(
        ctx: Any, links: tuple[Link, ...], x: Tensor, saved: Tensor, gamma: Tensor, beta: Tensor,
        residual: Tensor, residual_saved: Tensor | None = None, *residual_norm: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = Operand.joined(x, saved, residual, residual_saved).stored()
        projected = () if residual_saved is None else (residual, residual_saved, residual_norm[0])
        ctx.save_for_backward(y, x, saved, gamma, *projected)
        ctx.links = links
        ctx.set_materialize_grads(False)
        return y, y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        y, x, saved, gamma, *projected = ctx.saved_tensors
        first, second = two_gradients(gradients)
        if first is None:
            return (None,) * len(ctx.needs_input_grad)
        factors, dz = backward_sums(first, second, x, y, saved, gamma, relu=True)
        assert dz is not None
        link, *residual_link = ctx.links
        link.put(dz, factors)
        found = [None, dz, None, factors[0], factors[1], dz]
        if projected:
            residual, residual_saved, residual_gamma = projected
            factors, _ = backward_sums(
                dz, None, residual, None, residual_saved, residual_gamma, relu=False
            )
            residual_link[0].put(dz, factors)
            found += [None, factors[0], factors[1]]
        return tuple(found)
