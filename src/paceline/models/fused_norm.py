"""Batch norm together with the residual sum and the ReLU behind it, for autograd.

In: a map in channels-last memory and its `nn.BatchNorm2d`. Out: what norm, sum and ReLU one after the
other give, within rounding, at two thirds of the memory traffic. The module keeps parameters, statistics
and keys; only the arithmetic is ours. Training mode only: evaluation uses torch's operators.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.models import norm_launch
from paceline.models.norm_form import norm_can_fuse


def can_fuse(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Whether the fused kernels give what `norm(x)` would: training, running averages, NHWC memory, on a
    GPU."""
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
    """relu(norm(x + bias) + residual).

    A convolution's `bias` before batch norm moves the running mean and nothing else: the norm takes
    it out again, and its gradient is zero. So it is neither added nor differentiated here.
    """
    check_rows(x)
    out: Tensor = _NormAct.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, residual, norm, relu, False, bias
    )
    return out


def norm_act_twice(
    x: Tensor, norm: nn.BatchNorm2d, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`norm_act` for an output with two uses, one name for each.

    Their gradients then arrive one by one and are added inside the next kernel, instead of in a pass
    of its own over the largest maps.
    """
    check_rows(x)
    out: tuple[Tensor, Tensor] = _NormAct.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, residual, norm, True, True, None
    )
    return out


def check_rows(x: Tensor) -> None:
    """The same words as torch's own batch norm, which callers look for."""
    if x.numel() == x.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )


def can_launch(x: Tensor) -> bool:
    """On a GPU, or where Triton's interpreter stands in for one."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def as_map(gradient: Tensor) -> Tensor:
    """A gradient in the memory order that the kernels read."""
    return gradient.contiguous(memory_format=torch.channels_last)


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None,
        norm: nn.BatchNorm2d, relu: bool, twice: bool, offset: Tensor | None,
    ) -> Any:  # fmt: skip
        saved = norm_launch.statistics(x, norm, offset)
        shortcut = None if residual is None else as_map(residual)
        y = norm_launch.apply(x, saved, shortcut, relu)
        # Without a residual the ReLU's side follows from x; with one, only y still knows it.
        ctx.save_for_backward(x, weight, saved, *([] if residual is None else [y]))
        ctx.relu = relu
        ctx.set_materialize_grads(False)
        return (y, y.view_as(y)) if twice else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight, saved, *rest = ctx.saved_tensors
        given = [as_map(g) for g in gradients if g is not None]
        if not given:
            return (None,) * 8
        first, second = given[0], given[1] if len(given) > 1 else None
        found, dz = norm_launch.backward_sums(
            first, second, x, rest[0] if rest else None, saved, weight, ctx.relu
        )
        if dz is not None:
            dx = norm_launch.backward_input(dz, None, x, saved, found, relu=False)
        else:
            dx = norm_launch.backward_input(first, second, x, saved, found, relu=ctx.relu)
        return dx, found[0], found[1], dz, None, None, None, None
