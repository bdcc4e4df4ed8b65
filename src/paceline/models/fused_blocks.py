"""A bottleneck whose 1 × 1 convolutions are fused with the norms around them, as autograd functions.

    conv1 → norm → ReLU → conv2 (3 × 3) → norm → ReLU → conv3 → norm → + shortcut → ReLU

The convolutions' outputs are stored, not the normalized maps, but for those that the shortcut and,
unless `recompute` is on, a convolution of torch read. The last norm, sum and ReLU of a block are computed
by the block that follows: a block returns a `Pending` map, and the product of the next conv1 computes
and stores it while it loads it. In backward, the product that gives the gradient of that map applies sum
and ReLU and sums the gradients of γ and β.

The gradient of a `Pending` map's convolution output is a · dz + b · x + c (see
`kernels.backward_factors_kernel`). It is never stored: autograd passes dz in its place, and `Link` the
factors, to the products of conv3. So a `Pending` map has exactly one user, which this module ensures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.models.fused import (
    apply,
    as_map,
    backward_input,
    backward_sums,
    can_fuse,
    check_rows,
    statistics,
)
from paceline.models.products import (
    MASKED,
    MERGED,
    PLAIN,
    Epilogue,
    Operand,
    backward_product,
    forward_product,
)
from paceline.models.recompute import MapSource, RecomputedMap, not_stored
from paceline.models.resnet import convolve, norm_can_fuse, split_uses

if TYPE_CHECKING:
    from paceline.models.resnet import Bottleneck, Uses

_HALF = (torch.float16, torch.bfloat16)


class Link:
    """Passes the factors of a norm's gradient from the user of a `Pending` map to its block."""

    def __init__(self) -> None:
        self._given: tuple[int, Tensor] | None = None

    def put(self, dz: Tensor, factors: Tensor) -> None:
        self._given = (dz.data_ptr(), factors)

    def take(self, dz: Tensor) -> Tensor:
        assert self._given is not None, "a pending map has no other user than the next block"
        place, factors = self._given
        assert place == dz.data_ptr(), "a pending map has one user"
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
    """relu(norm(x) + shortcut), which its only user computes. The shortcut is `residual`, a stored
    map, or its norm of a convolution's output. `saved`: see `fused.statistics`."""

    branch: Normed
    residual: Normed | Tensor

    def output(self) -> tuple[Tensor, Tensor]:
        """Twice, see `fused.norm_act_twice`."""
        out: tuple[Tensor, Tensor] = _Join.apply(  # type: ignore[no-untyped-call]
            *self.tensors(), self.links()
        )
        return out

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Map, statistics, γ and β of the branch and of the shortcut."""
        if isinstance(self.residual, Normed):
            return *self.branch.tensors(), *self.residual.tensors()
        return *self.branch.tensors(), self.residual, None, None, None

    def links(self) -> tuple[Link, Link | None]:
        return self.branch.link, self.residual.link if isinstance(self.residual, Normed) else None


def can_fuse_block(block: Bottleneck, x: Uses) -> bool:
    """Whether the kernels can compute the block: norms that `can_fuse`, weights of the map's type,
    which is half precision on a GPU."""
    maps = x.branch.x if isinstance(x, Pending) else split_uses(x)[0]
    return (
        can_fuse(maps, block.bn1)
        and norm_can_fuse(block.bn2)
        and norm_can_fuse(block.bn3)
        and (maps.dtype in _HALF or not maps.is_cuda)
        and block.conv1.weight.dtype == block.conv3.weight.dtype == maps.dtype
    )


def fused_bottleneck(block: Bottleneck, x: Uses) -> Pending:
    norm1, norm2, norm3 = block.bn1, block.bn2, block.bn3
    if isinstance(x, Pending):
        check_rows(x.branch.x)
        branch, shortcut, raw, raw_saved = _JoinReduce.apply(  # type: ignore[no-untyped-call]
            *x.tensors(), block.conv1.weight, norm1.weight, norm1.bias, norm1, x.links()
        )
    else:
        inputs, shortcut = split_uses(x)
        check_rows(inputs)
        with not_stored(x):
            branch, raw, raw_saved = _Reduce.apply(  # type: ignore[no-untyped-call]
                inputs, block.conv1.weight, norm1.weight, norm1.bias, norm1
            )
    middle = as_map(_convolve_middle(block, branch, raw, raw_saved))
    check_rows(middle)
    link = Link()
    out, saved = _Expand.apply(  # type: ignore[no-untyped-call]
        middle, norm2.weight, norm2.bias, block.conv3.weight, norm2, norm3, link, block.recompute
    )
    with not_stored(x):
        return Pending(Normed(out, saved, norm3, link), _shortcut(block, shortcut))


def _convolve_middle(block: Bottleneck, y: Tensor, x: Tensor, saved: Tensor) -> Tensor:
    """conv2 of y = relu(norm(x))."""
    given: Uses = y
    if block.recompute:
        source = MapSource()
        source.set(y, partial(apply, x, saved, None, relu=True))
        given = RecomputedMap(y, y, source)
    return convolve(block.conv2, given)


def _shortcut(block: Bottleneck, x: Tensor) -> Normed | Tensor:
    if block.downsample is None:
        return as_map(x)
    convolution, norm = block.downsample
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    if not norm_can_fuse(norm) or convolution.weight.dtype != x.dtype:
        return as_map(block.shortcut(x))
    link = Link()
    out, saved = _Project.apply(  # type: ignore[no-untyped-call]
        x, convolution.weight, convolution.stride, norm, link
    )
    return Normed(out, saved, norm, link)


class _Reduce(torch.autograd.Function):
    """relu(norm(conv1(inputs))) of a stored map; and conv1(inputs), with its statistics."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, norm: nn.BatchNorm2d
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, saved, _ = forward_product(Operand(inputs), weight, norm)
        ctx.save_for_backward(inputs, weight, gamma, x, saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(x, saved)
        return apply(x, saved, None, relu=True), x, saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *unused: Any) -> Any:
        if dy is None:
            return (None,) * 5
        inputs, weight, gamma, x, saved = ctx.saved_tensors
        dy = as_map(dy)
        found, _ = backward_sums(dy, None, x, None, saved, gamma, relu=True)
        gradients = backward_product(
            Operand.gradient(dy, x, saved, found, relu=True), weight, Operand(inputs),
            Epilogue(PLAIN, inputs), wants_weight=ctx.needs_input_grad[1],
        )  # fmt: skip
        return gradients.dx, gradients.weight, found[0], found[1], None


class _JoinReduce(torch.autograd.Function):
    """relu(norm(conv1(y))) and y = relu(norm_before(before) + shortcut), see `Pending.tensors`; and
    conv1(y), with its statistics."""

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, before_saved: Tensor, before_gamma: Tensor, before_beta: Tensor,
        residual: Tensor, residual_saved: Tensor | None, residual_gamma: Tensor | None,
        residual_beta: Tensor | None, weight: Tensor, gamma: Tensor, beta: Tensor,
        norm: nn.BatchNorm2d, links: tuple[Link, Link | None],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        joined = Operand.joined(before, before_saved, residual, residual_saved)
        x, saved, y = forward_product(joined, weight, norm, keep=True)
        assert y is not None
        projected = () if residual_saved is None else (residual, residual_saved, residual_gamma)
        ctx.save_for_backward(
            before, before_saved, before_gamma, y, weight, gamma, x, saved, *projected
        )
        ctx.links = links
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(x, saved)
        return apply(x, saved, None, relu=True), y, x, saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dy_shortcut: Tensor | None, *unused: Any) -> Any:
        before, before_saved, before_gamma, y, weight, gamma, x, saved, *projected = (
            ctx.saved_tensors
        )
        residual, residual_saved, residual_gamma = projected or (None,) * 3
        assert dy is not None, "a block's branch is always used"
        dy = as_map(dy)
        found, _ = backward_sums(dy, None, x, None, saved, gamma, relu=True)
        add = None if dy_shortcut is None else as_map(dy_shortcut)
        gradients = backward_product(
            Operand.gradient(dy, x, saved, found, relu=True), weight, Operand(y),
            Epilogue(MERGED, before, before_saved, y, add, residual, residual_saved),
            wants_weight=ctx.needs_input_grad[8],
        )  # fmt: skip
        dz, (link, residual_link) = gradients.dx, ctx.links
        factors = gradients.factors(before_gamma, before_saved)
        link.put(dz, factors)
        of_residual: tuple[Tensor | None, Tensor | None] = (None, None)
        if residual_link is not None:
            assert residual_gamma is not None
            assert residual_saved is not None
            others = gradients.factors(residual_gamma, residual_saved, other=True)
            residual_link.put(dz, others)
            of_residual = (others[0], others[1])
        return (
            dz, None, factors[0], factors[1], dz, None, *of_residual,
            gradients.weight, found[0], found[1], None, None,
        )  # fmt: skip


class _Expand(torch.autograd.Function):
    """conv3(relu(norm2(x))), and the statistics of norm3 on it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, norm: nn.BatchNorm2d,
        next_norm: nn.BatchNorm2d, link: Link, recompute: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        saved = statistics(x, norm)
        out, next_saved, y = forward_product(Operand.normalized(x, saved), weight, next_norm)
        # A separate convolution has stored its input: kept for backward, it need not be made again.
        kept = [] if y is None or recompute else [y]
        ctx.save_for_backward(x, saved, gamma, weight, out, next_saved, *kept)
        ctx.link = link
        ctx.mark_non_differentiable(next_saved)
        return out, next_saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, _: Any) -> Any:
        x, saved, gamma, weight, out, next_saved, *kept = ctx.saved_tensors
        factors = ctx.link.take(dz)
        gradients = backward_product(
            Operand.gradient(dz, out, next_saved, factors, relu=False), weight,
            Operand(kept[0]) if kept else Operand.normalized(x, saved), Epilogue(MASKED, x, saved),
            wants_weight=ctx.needs_input_grad[3],
        )  # fmt: skip
        found = gradients.factors(gamma, saved)
        # Separate products leave the ReLU to this; for fused ones it changes nothing.
        dx = backward_input(gradients.dx, None, x, saved, found, relu=True)
        return dx, found[0], found[1], gradients.weight, None, None, None, None


class _Project(torch.autograd.Function):
    """The convolution of a shortcut, and the statistics of its norm on it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], norm: nn.BatchNorm2d,
        link: Link,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if stride == (1, 1):
            out, saved, _ = forward_product(Operand(x), weight, norm)
        else:
            out = as_map(F.conv2d(x, weight, None, stride))
            check_rows(out)
            saved = statistics(out, norm)
        ctx.save_for_backward(x, weight, out, saved)
        ctx.stride, ctx.link = stride, link
        ctx.mark_non_differentiable(saved)
        return out, saved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, _: Any) -> Any:
        x, weight, out, saved = ctx.saved_tensors
        gradient = Operand.gradient(dz, out, saved, ctx.link.take(dz), relu=False)
        wants_weight = ctx.needs_input_grad[1]
        if ctx.stride == (1, 1):
            found = backward_product(
                gradient, weight, Operand(x), Epilogue(PLAIN, x), wants_weight=wants_weight
            )
            return found.dx, found.weight, None, None, None
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            gradient.stored(), x, weight, None, ctx.stride, [0, 0], [1, 1], False, [0, 0], 1,
            [True, wants_weight, False],
        )  # fmt: skip
        return dx, dweight, None, None, None


class _Join(torch.autograd.Function):
    """relu(norm(x) + shortcut), stored, where no fused block follows; see `Pending.tensors`."""

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
