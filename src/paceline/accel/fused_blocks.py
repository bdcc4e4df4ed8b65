"""A residual block whose convolutions are fused with the norms around them, as autograd functions.

    conv1 → norm → ReLU → conv2 (3 × 3) → norm → ReLU → conv3 → norm → + shortcut → ReLU
    conv1 (3 × 3) → norm → ReLU → conv2 (3 × 3) → norm → + shortcut → ReLU

Outputs of convolutions are stored. Normalized activations are stored only if the shortcut reads them or,
unless `recompute` is on, a convolution of torch does. A block returns a `DeferredOutput`: the fused
convolution conv1 of the next block computes the last norm, sum and ReLU while it loads its input, and
stores the result. In the backward pass, the convolution that produces the gradient of a normalized
activation applies sum and ReLU and computes the sums of the gradients of γ and β.

With `recompute`, autograd does not save the output of a block whose shortcut is stored: the backward pass
recomputes it from the input of the last norm and the shortcut (see `paceline.accel.recompute`).

The gradient of a convolution's output is a · dz + b · x + c (see `kernels.backward_factors_kernel`), and
dz is the gradient of the norm's output. Autograd passes dz in its place, and `Link` passes the factors to
the gradients of that convolution. Therefore each such activation must have exactly one reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.accel.fused import backward_sums, can_fuse, channels_last, norm_can_fuse
from paceline.accel.fused_convolutions import backward_convolution, forward_convolution
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.accel.networks import Block
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
    """Passes the factors of a norm's gradient from the only reader of its output to the convolution."""

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
    """norm(x) of the output `x` of a convolution, which is not stored."""

    x: Tensor
    saved: Tensor
    norm: nn.BatchNorm2d
    link: Link

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.saved, self.norm.weight, self.norm.bias


@dataclass
class DeferredOutput:
    """relu(norm(x) + shortcut) of a block, which its only reader computes.

    Attributes:
        branch: The norm of the branch.
        residual: The shortcut: an activation, or the norm of a convolution's output.
        choices: The chosen implementations.
        recompute: True if the reader does not save it for the backward pass; the shortcut must be stored.
    """

    branch: Normed
    residual: Normed | Tensor | RecomputedActivation
    choices: Choices
    recompute: bool = False

    def output(self) -> tuple[Tensor, Tensor]:
        """Computes the output and returns it twice, see `fused.norm_act_twice`."""
        out: tuple[Tensor, Tensor] = _Join.apply(  # type: ignore[no-untyped-call]
            *self.tensors(), self.links()
        )
        return out

    def reduced(
        self, weight: Tensor, stride: int, norm: nn.BatchNorm2d, link: Link
    ) -> tuple[Tensor, Tensor, Tensor | RecomputedActivation]:
        """Computes the output and its convolution.

        Returns:
            The convolution's output, the statistics of `norm` on it, and the activation for the shortcut.
        """
        source = ActivationSource() if self.recompute else None
        # Either the output or the shortcut is not stored, never both.
        with not_stored(self.residual) if source is None else source.not_stored():
            out, saved, y = _JoinReduce.apply(  # type: ignore[no-untyped-call]
                *self.tensors(), weight, stride, norm, self.links(), link, source, self.choices
            )
        return out, saved, y if source is None else RecomputedActivation(y, y, source)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns activation, statistics, γ and β of the branch and of the shortcut."""
        if isinstance(self.residual, Normed):
            return *self.branch.tensors(), *self.residual.tensors()
        _, residual = branch_and_shortcut(self.residual)
        return *self.branch.tensors(), residual, None, None, None

    def links(self) -> tuple[Link, Link | None]:
        return self.branch.link, self.residual.link if isinstance(self.residual, Normed) else None


def can_fuse_block(block: Block, x: BlockInput) -> bool:
    """Returns True if the kernels support the block.

    Its norms must pass `can_fuse`, and its weights must have the type of the activation, which is half
    precision on a GPU.
    """
    maps = x.branch.x if isinstance(x, DeferredOutput) else branch_and_shortcut(x)[0]
    return (maps.dtype in _HALF or not maps.is_cuda) and all(
        can_fuse(maps, norm) and _is_plain(convolution, maps.dtype)
        for convolution, norm in block.branch
    )


def _is_plain(convolution: nn.Module, kind: torch.dtype) -> TypeGuard[nn.Conv2d]:
    """Returns True for a convolution as ResNets use it."""
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
    """Computes a block for which `can_fuse_block` is True.

    Args:
        block: The block.
        x: Its input.
        forward: Computes what cannot be fused, and knows if norms are recomputed.
        choices: The chosen implementations.
    """
    first, *others = (_given(*pair) for pair in block.branch)
    link = Link()
    if isinstance(x, DeferredOutput):
        raw, saved, x = x.reduced(*first, link)
    else:
        with not_stored(x):
            raw, saved = _Convolve.apply(  # type: ignore[no-untyped-call]
                branch_and_shortcut(x)[0], *first, link, True, choices
            )
    branch = Normed(raw, saved, first[2], link)
    for given in others:
        relu = given[2] is not block.last_norm
        branch = _convolve_normed(forward, choices, branch, given, relu)
    stored = block.downsample is None and not isinstance(x, RecomputedActivation)
    recompute = forward.recomputes and stored
    return DeferredOutput(branch, _shortcut(block, x, forward, choices), choices, recompute)


def _given(convolution: nn.Module, norm: nn.Module) -> tuple[Tensor, int, nn.BatchNorm2d]:
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return convolution.weight, convolution.stride[0], norm


def _convolve_normed(
    forward: FusedForward, choices: Choices, x: Normed, given: tuple[Tensor, int, nn.BatchNorm2d],
    relu: bool,
) -> Normed:  # fmt: skip
    """Computes a convolution of relu(norm(x)). With `relu`, a ReLU follows its own norm."""
    link = Link()
    out, saved = _ConvolveNormed.apply(  # type: ignore[no-untyped-call]
        *x.tensors(), *given, (x.link, link), relu, forward.recompute, choices
    )
    return Normed(out, saved, given[2], link)


def _shortcut(
    block: Block, x: BlockInput, forward: FusedForward, choices: Choices
) -> Normed | Tensor | RecomputedActivation:
    _, maps = branch_and_shortcut(x)
    if block.downsample is None:
        return x if isinstance(x, RecomputedActivation) else channels_last(maps)
    convolution, norm = block.downsample
    if not norm_can_fuse(norm) or not _is_plain(convolution, maps.dtype):
        return channels_last(forward.shortcut(block, x))
    link = Link()
    with not_stored(x):
        out, saved = _Convolve.apply(  # type: ignore[no-untyped-call]
            maps, convolution.weight, convolution.stride[0], norm, link, False, choices
        )
    return Normed(out, saved, norm, link)


class _Convolve(torch.autograd.Function):
    """The convolution of a stored activation, and the statistics of its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, norm: nn.BatchNorm2d, link: Link,
        relu: bool, choices: Choices,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, saved, _ = forward_convolution(choices, Operand(x), weight, norm, stride)
        ctx.save_for_backward(x, weight, out, saved)
        ctx.stride, ctx.link, ctx.relu, ctx.choices = stride, link, relu, choices
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved)
        return out, saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, _: Any) -> Any:
        if dz is None:
            return (None,) * 7
        x, weight, out, saved = ctx.saved_tensors
        gradients = backward_convolution(
            ctx.choices, Operand.gradient(dz, out, saved, ctx.link.take(dz), relu=ctx.relu), weight,
            Operand(x), Epilogue.plain(x), ctx.stride, wants_weight=ctx.needs_input_grad[1],
        )  # fmt: skip
        return gradients.dx, gradients.weight, None, None, None, None, None


class _JoinReduce(torch.autograd.Function):
    """conv1(y), the statistics of its norm, and y = relu(norm_before(before) + shortcut).

    See `DeferredOutput.tensors`. `source` is given if y is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, before_saved: Tensor, before_gamma: Tensor, before_beta: Tensor,
        residual: Tensor, residual_saved: Tensor | None, residual_gamma: Tensor | None,
        residual_beta: Tensor | None, weight: Tensor, stride: int, norm: nn.BatchNorm2d,
        links: tuple[Link, Link | None], link: Link, source: ActivationSource | None, choices: Choices,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        joined = Operand.joined(before, before_saved, residual, residual_saved)
        out, saved, y = forward_convolution(choices, joined, weight, norm, stride, keep=True)
        assert y is not None
        projected = residual_saved is not None
        if source is not None:
            # Bit for bit y, because Triton's kernels round like `stored`. cuDNN reads the norm's scale in
            # fp16, so its y agrees within rounding. That is enough: the ReLU mask in its backward pass
            # uses fp32 scales, too, and its sums have no fixed order.
            again = Operand.joined(before.detach(), before_saved, residual.detach())
            source.set(y, again.stored)
        # Only cuDNN reads a stored residual in the backward pass.
        kept = residual if projected or choices.mode == CUDNN else None
        ctx.save_for_backward(
            before, before_saved, before_gamma, before_beta, y, weight, out, saved,
            kept, residual_saved, residual_gamma, residual_beta,
        )  # fmt: skip
        ctx.stride, ctx.links, ctx.link, ctx.choices = stride, links, link, choices
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved)
        return out, saved, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, _: Any, dy_shortcut: Tensor | None) -> Any:
        branch, (y, weight, out, saved) = NormedMap(*ctx.saved_tensors[:4]), ctx.saved_tensors[4:8]
        residual, *norm = ctx.saved_tensors[8:]
        shortcut = residual if norm[0] is None else NormedMap(residual, *norm)
        assert dz is not None, "a block's branch is always used"
        add = None if dy_shortcut is None else channels_last(dy_shortcut)
        gradients = backward_convolution(
            ctx.choices, Operand.gradient(dz, out, saved, ctx.link.take(dz), relu=True), weight,
            Operand(y), Epilogue.merged(branch, y, add, shortcut), ctx.stride,
            wants_weight=ctx.needs_input_grad[8],
        )  # fmt: skip
        given, (link, residual_link) = gradients.dx, ctx.links
        factors = gradients.factors(branch)
        link.put(given, factors)
        of_residual: tuple[Tensor | None, Tensor | None] = (None, None)
        if residual_link is not None:
            assert isinstance(shortcut, NormedMap)
            others = gradients.factors(shortcut, other=True)
            residual_link.put(given, others)
            of_residual = (others[0], others[1])
        return (
            given, None, factors[0], factors[1], given, None, *of_residual, gradients.weight,
            None, None, None, None, None, None,
        )  # fmt: skip


class _ConvolveNormed(torch.autograd.Function):
    """The convolution of relu(norm(x)), and the statistics of its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, saved: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, stride: int,
        next_norm: nn.BatchNorm2d, links: tuple[Link, Link], relu: bool, recompute: bool,
        choices: Choices,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        operand = Operand.normalized(x, saved)
        out, next_saved, y = forward_convolution(
            choices, operand, weight, next_norm, stride, recompute=recompute
        )
        # If the input was stored, save it, so that it need not be recomputed.
        kept = [] if y is None else [y]
        ctx.save_for_backward(x, saved, gamma, beta, weight, out, next_saved, *kept)
        ctx.stride, ctx.links, ctx.relu, ctx.choices = stride, links, relu, choices
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(next_saved)
        return out, next_saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, _: Any) -> Any:
        assert dz is not None, "a block's branch is always used"
        x, saved, gamma, beta, weight, out, next_saved, *kept = ctx.saved_tensors
        branch, (before, link) = NormedMap(x, saved, gamma, beta), ctx.links
        gradients = backward_convolution(
            ctx.choices, Operand.gradient(dz, out, next_saved, link.take(dz), relu=ctx.relu), weight,
            Operand(kept[0]) if kept else Operand.normalized(x, saved),
            Epilogue.masked(branch), ctx.stride, wants_weight=ctx.needs_input_grad[4],
        )  # fmt: skip
        factors = gradients.factors(branch)
        # With the separate implementation, the previous convolution's gradients apply the ReLU.
        before.put(gradients.dx, factors)
        return (
            gradients.dx, None, factors[0], factors[1], gradients.weight,
            None, None, None, None, None, None,
        )  # fmt: skip


class _Join(torch.autograd.Function):
    """relu(norm(x) + shortcut), stored, if no fused block follows. See `DeferredOutput.tensors`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, saved: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor,
        residual_saved: Tensor | None, residual_gamma: Tensor | None, residual_beta: Tensor | None,
        links: tuple[Link, Link | None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = Operand.joined(x, saved, residual, residual_saved).stored()
        projected = () if residual_saved is None else (residual, residual_saved, residual_gamma)
        ctx.save_for_backward(x, saved, gamma, y, *projected)
        ctx.links = links
        ctx.set_materialize_grads(False)
        return y, y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, saved, gamma, y, *projected = ctx.saved_tensors
        given = [channels_last(g) for g in gradients if g is not None]
        if not given:
            return (None,) * 9
        found, dz = backward_sums(
            given[0], given[1] if len(given) > 1 else None, x, y, saved, gamma, relu=True
        )
        assert dz is not None
        link, residual_link = ctx.links
        link.put(dz, found)
        of_residual: tuple[Tensor | None, Tensor | None] = (None, None)
        if residual_link is not None:
            residual, residual_saved, residual_gamma = projected
            others, _ = backward_sums(
                dz, None, residual, None, residual_saved, residual_gamma, relu=False
            )
            residual_link.put(dz, others)
            of_residual = (others[0], others[1])
        return dz, None, found[0], found[1], dz, None, *of_residual, None
