"""A residual block whose convolutions are fused with the norms around them, as autograd functions.

    conv1 → norm → ReLU → conv2 (3 × 3) → norm → ReLU → conv3 → norm → + shortcut → ReLU
    conv1 (3 × 3) → norm → ReLU → conv2 (3 × 3) → norm → + shortcut → ReLU

The convolutions' outputs are stored, not the normalized maps, but for those that the shortcut and,
unless `recompute` is on, a convolution of torch read. The last norm, sum and ReLU of a block are computed
by the block that follows: a block returns a `Pending` map, and the product of the next conv1 computes
and stores it while it loads it. In backward, the product that gives the gradient of a normalized map
applies sum and ReLU and sums the gradients of γ and β.

With `recompute`, autograd does not keep the output of a block whose shortcut is a stored map, as in
`paceline.accel.recompute`: backward computes it again from the last norm's input and the shortcut.

The gradient of a convolution's output is a · dz + b · x + c (see `kernels.backward_factors_kernel`),
where dz is that of the norm's output. Autograd passes dz in its place, and `Link` the factors, to the
products of that convolution. So such a map has exactly one user, which this module ensures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.accel.fused import as_map, backward_sums, can_fuse, norm_can_fuse
from paceline.accel.networks import Block
from paceline.accel.operands import Epilogue, NormedMap, Operand
from paceline.accel.product_choice import CUDNN, Choices
from paceline.accel.products import backward_product, forward_product
from paceline.accel.recompute import MapSource, RecomputedMap, Uses, not_stored, split_uses
from paceline.accel.stem import is_plain

if TYPE_CHECKING:
    from paceline.accel.fused_forward import FusedForward

_HALF = (torch.float16, torch.bfloat16)


class Link:
    """Passes the factors of a norm's gradient from the only user of its output to the convolution."""

    def __init__(self) -> None:
        self._given: tuple[int, Tensor] | None = None

    def put(self, dz: Tensor, factors: Tensor) -> None:
        self._given = (dz.data_ptr(), factors)

    def take(self, dz: Tensor) -> Tensor:
        assert self._given is not None, "the user of a normalized map is fused too"
        place, factors = self._given
        assert place == dz.data_ptr(), "a normalized map has one user"
        self._given = None
        return factors


@dataclass
class Normed:
    """norm(x) of a convolution's output `x`, not stored."""

    x: Tensor
    saved: Tensor
    norm: nn.BatchNorm2d
    link: Link

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.saved, self.norm.weight, self.norm.bias


@dataclass
class Pending:
    """relu(norm(x) + shortcut), which its only user computes. The shortcut is `residual`, a map, or its
    norm of a convolution's output. `saved`: see `fused.statistics`. `recompute`: its user does not keep
    it for backward, for which the shortcut is a stored map."""

    branch: Normed
    residual: Normed | Tensor | RecomputedMap
    choices: Choices
    recompute: bool = False

    def output(self) -> tuple[Tensor, Tensor]:
        """Twice, see `fused.norm_act_twice`."""
        out: tuple[Tensor, Tensor] = _Join.apply(  # type: ignore[no-untyped-call]
            *self.tensors(), self.links()
        )
        return out

    def reduced(
        self, weight: Tensor, stride: int, norm: nn.BatchNorm2d, link: Link
    ) -> tuple[Tensor, Tensor, Tensor | RecomputedMap]:
        """Its convolution, the statistics of `norm` on it, and the map for the shortcut."""
        source = MapSource() if self.recompute else None
        # Either the map is not kept, or a shortcut that is not stored, never both.
        with not_stored(self.residual) if source is None else source.not_stored():
            out, saved, y = _JoinReduce.apply(  # type: ignore[no-untyped-call]
                *self.tensors(), weight, stride, norm, self.links(), link, source, self.choices
            )
        return out, saved, y if source is None else RecomputedMap(y, y, source)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Map, statistics, γ and β of the branch and of the shortcut."""
        if isinstance(self.residual, Normed):
            return *self.branch.tensors(), *self.residual.tensors()
        _, residual = split_uses(self.residual)
        return *self.branch.tensors(), residual, None, None, None

    def links(self) -> tuple[Link, Link | None]:
        return self.branch.link, self.residual.link if isinstance(self.residual, Normed) else None


def can_fuse_block(block: Block, x: Uses) -> bool:
    """Whether the kernels can compute the block: norms that `can_fuse`, weights of the map's type,
    which is half precision on a GPU."""
    maps = x.branch.x if isinstance(x, Pending) else split_uses(x)[0]
    return (maps.dtype in _HALF or not maps.is_cuda) and all(
        can_fuse(maps, norm) and _is_plain(convolution, maps.dtype)
        for convolution, norm in block.branch
    )


def _is_plain(convolution: nn.Module, kind: torch.dtype) -> TypeGuard[nn.Conv2d]:
    """As ResNets have them."""
    if not is_plain(convolution) or convolution.bias is not None:
        return False
    down, across = convolution.kernel_size
    return (
        convolution.weight.dtype == kind
        and convolution.padding == (down // 2, across // 2)
        and convolution.stride[0] == convolution.stride[1]
    )


def fused_block(block: Block, x: Uses, forward: FusedForward, choices: Choices) -> Pending:
    """Computes a block that `can_fuse_block`. `forward` computes what has no fused form, and says whether
    norms are computed again."""
    first, *others = (_given(*pair) for pair in block.branch)
    link = Link()
    if isinstance(x, Pending):
        raw, saved, x = x.reduced(*first, link)
    else:
        with not_stored(x):
            raw, saved = _Convolve.apply(  # type: ignore[no-untyped-call]
                split_uses(x)[0], *first, link, True, choices
            )
    branch = Normed(raw, saved, first[2], link)
    for given in others:
        relu = given[2] is not block.last_norm
        branch = _convolve_normed(forward, choices, branch, given, relu)
    stored = block.downsample is None and not isinstance(x, RecomputedMap)
    recompute = forward.recomputes and stored
    return Pending(branch, _shortcut(block, x, forward, choices), choices, recompute)


def _given(convolution: nn.Module, norm: nn.Module) -> tuple[Tensor, int, nn.BatchNorm2d]:
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return convolution.weight, convolution.stride[0], norm


def _convolve_normed(
    forward: FusedForward, choices: Choices, x: Normed, given: tuple[Tensor, int, nn.BatchNorm2d],
    relu: bool,
) -> Normed:  # fmt: skip
    """`relu`: follows the norm."""
    link = Link()
    out, saved = _ConvolveNormed.apply(  # type: ignore[no-untyped-call]
        *x.tensors(), *given, (x.link, link), relu, forward.recompute, choices
    )
    return Normed(out, saved, given[2], link)


def _shortcut(
    block: Block, x: Uses, forward: FusedForward, choices: Choices
) -> Normed | Tensor | RecomputedMap:
    _, maps = split_uses(x)
    if block.downsample is None:
        return x if isinstance(x, RecomputedMap) else as_map(maps)
    convolution, norm = block.downsample
    if not norm_can_fuse(norm) or not _is_plain(convolution, maps.dtype):
        return as_map(forward.shortcut(block, x))
    link = Link()
    with not_stored(x):
        out, saved = _Convolve.apply(  # type: ignore[no-untyped-call]
            maps, convolution.weight, convolution.stride[0], norm, link, False, choices
        )
    return Normed(out, saved, norm, link)


class _Convolve(torch.autograd.Function):
    """The convolution of a stored map, and the statistics of its norm on it. `relu`: follows the
    norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, norm: nn.BatchNorm2d, link: Link,
        relu: bool, choices: Choices,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, saved, _ = forward_product(choices, Operand(x), weight, norm, stride)
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
        gradients = backward_product(
            ctx.choices, Operand.gradient(dz, out, saved, ctx.link.take(dz), relu=ctx.relu), weight,
            Operand(x), Epilogue.plain(x), ctx.stride, wants_weight=ctx.needs_input_grad[1],
        )  # fmt: skip
        return gradients.dx, gradients.weight, None, None, None, None, None


class _JoinReduce(torch.autograd.Function):
    """conv1(y), the statistics of its norm on it, and y = relu(norm_before(before) + shortcut), see
    `Pending.tensors`. `source`: of y, where backward computes it again."""

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, before_saved: Tensor, before_gamma: Tensor, before_beta: Tensor,
        residual: Tensor, residual_saved: Tensor | None, residual_gamma: Tensor | None,
        residual_beta: Tensor | None, weight: Tensor, stride: int, norm: nn.BatchNorm2d,
        links: tuple[Link, Link | None], link: Link, source: MapSource | None, choices: Choices,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        joined = Operand.joined(before, before_saved, residual, residual_saved)
        out, saved, y = forward_product(choices, joined, weight, norm, stride, keep=True)
        assert y is not None
        projected = residual_saved is not None
        if source is not None:
            # The bits of y: products round as `stored` does. Only forms of cuDNN that compute y read the
            # norm's scale in fp16; theirs agrees within rounding. That is enough: their gradients take
            # signs at ReLUs from scales in fp32, too, and their sums have no fixed order.
            again = Operand.joined(before.detach(), before_saved, residual.detach())
            source.set(y, again.stored)
        # Only the forms of cuDNN read a stored residual again.
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
        add = None if dy_shortcut is None else as_map(dy_shortcut)
        gradients = backward_product(
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
    """The convolution of relu(norm(x)), and the statistics of its norm on it. `relu`: follows that
    norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, saved: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, stride: int,
        next_norm: nn.BatchNorm2d, links: tuple[Link, Link], relu: bool, recompute: bool,
        choices: Choices,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        operand = Operand.normalized(x, saved)
        out, next_saved, y = forward_product(
            choices, operand, weight, next_norm, stride, recompute=recompute
        )
        # A convolution of a stored input: kept for backward, it need not be made again.
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
        gradients = backward_product(
            ctx.choices, Operand.gradient(dz, out, next_saved, link.take(dz), relu=ctx.relu), weight,
            Operand(kept[0]) if kept else Operand.normalized(x, saved),
            Epilogue.masked(branch), ctx.stride, wants_weight=ctx.needs_input_grad[4],
        )  # fmt: skip
        factors = gradients.factors(branch)
        # Separate products leave the ReLU to those of the convolution before.
        before.put(gradients.dx, factors)
        return (
            gradients.dx, None, factors[0], factors[1], gradients.weight,
            None, None, None, None, None, None,
        )  # fmt: skip


class _Join(torch.autograd.Function):
    """relu(norm(x) + shortcut), stored, if no fused block follows; see `Pending.tensors`."""

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
        given = [as_map(g) for g in gradients if g is not None]
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
