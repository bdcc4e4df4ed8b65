"""Batch norms with statistics over several ranks, without cuDNN, or with recomputed outputs.

`SyncedBatchNorm` normalizes over the samples of a group of ranks, for training with few samples per
rank. Both passes give the same results as a batch norm over the combined batches of the group. The
forward and the backward pass each exchange one fp64 vector per layer, so that statistics are
bit-identical within a group. torch's SyncBatchNorm does the same, but only on GPUs. `TorchNorm`
avoids cuDNN, for ranks that share a GPU. `normalized` returns the output of a norm and a function
that computes this output again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.errors import ConfigError


@dataclass
class NormGroup:
    """A group of ranks that share batch-norm statistics.

    Attributes:
        size: Number of ranks in the group.
        all_reduce: Replaces a tensor by the sum of this tensor over the ranks of the group.
        active: False in passes that not all ranks run, such as the pass that records the order of
            the gradients. Each rank then uses the statistics of its own batch.
    """

    size: int
    all_reduce: Callable[[Tensor], None]
    active: bool = False


class SyncedBatchNorm(_BatchNorm):
    """Batch norm over the batches of all ranks in `group`, for inputs with any number of dimensions."""

    group: NormGroup

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(
                f"batch norm expects an input of at least 2 dimensions, got {input.dim()}"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.forward_shared(input)[0] if self.is_shared else super().forward(input)

    @property
    def is_shared(self) -> bool:
        """True if the next pass uses the statistics of all ranks in the group."""
        return self.training and self.group.active

    def forward_shared(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: A002
        """Returns the output, and the mean and variance over the group."""
        self._check_input_dim(input)
        out, mean, variance, count = _SyncedNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.group
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            assert self.momentum is not None
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.lerp_(new.to(running.dtype), self.momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
        return out, mean, variance


def _normalize(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes `x` with the given mean and variance.

    Returns:
        The output, and the shift and scale that the backward pass needs.
    """
    wide = _widened(x)
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    inverse = (variance + eps).rsqrt()
    shift, scale = mean.to(wide.dtype).view(shape), inverse.to(wide.dtype).view(shape)
    out = (wide - shift) * scale
    if weight is not None and bias is not None:
        out = out * weight.to(wide.dtype).view(shape) + bias.to(wide.dtype).view(shape)
    out = out.to(x.dtype)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        out = out.contiguous(memory_format=torch.channels_last)
    return out, shift, scale


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _SyncedNorm(torch.autograd.Function):
    """Computes y = γ(x − μ) / √(σ² + eps) + β, with μ and σ² over all ranks of the group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: NormGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = _widened(x)
        own = x.numel() // x.shape[1]
        # Derives sums from this rank's moments: with a large mean, direct sums would lose accuracy.
        if own:
            variance, mean = torch.var_mean(wide, dims, correction=0)
            mean, variance = mean.double(), variance.double()
        else:
            mean = variance = x.new_zeros(x.shape[1], dtype=torch.float64)
        sums = torch.cat([own * mean, own * (variance + mean * mean), mean.new_full((1,), own)])
        group.all_reduce(sums)
        count, channels = sums[-1], x.shape[1]
        mean = sums[:channels] / count
        variance = (sums[channels:-1] / count - mean * mean).clamp_(min=0)
        out, shift, scale = _normalize(x, mean, variance, weight, bias, eps)
        ctx.save_for_backward(x, weight, shift, scale, count)
        ctx.group, ctx.dims = group, dims
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, shift, scale, count = ctx.saved_tensors
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        # A rank that does not use its output still participates in the exchange.
        given = torch.zeros_like(x) if gradient is None else gradient
        slope, normal = given.to(wide), (x.to(wide) - shift) * scale
        own = torch.cat([slope.sum(ctx.dims).double(), (slope * normal).sum(ctx.dims).double()])
        channels = x.shape[1]
        total = own.clone()
        ctx.group.all_reduce(total)
        means = (total / count).to(wide)
        first, second = means[:channels].view(shift.shape), means[channels:].view(shift.shape)
        factor = scale if weight is None else scale * weight.to(wide).view(shift.shape)
        dx = ((slope - first - normal * second) * factor).to(x.dtype)
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            dx = dx.contiguous(memory_format=torch.channels_last)
        if weight is None:
            return dx, None, None, None, None
        # Returns only this rank's summand in the gradients of γ and β; the gradient exchange adds them.
        d_weight, d_bias = own[channels:].to(weight.dtype), own[:channels].to(weight.dtype)
        return dx, d_weight, d_bias, None, None


def synchronize_norms(model: nn.Module, group: NormGroup) -> int:
    """Converts every batch norm of a model to a `SyncedBatchNorm` in place.

    Parameters, statistics and keys stay the same.

    Args:
        model: The model.
        group: The ranks that share statistics.

    Returns:
        The number of batch norms.
    """
    norms = find_norms(model)
    for norm in norms:
        norm.__class__ = SyncedBatchNorm
        norm.group = group  # type: ignore[assignment]
    return len(norms)


def find_norms(model: nn.Module) -> list[_BatchNorm]:
    """Returns all batch norms of a model."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def keep_last_statistics(model: nn.Module) -> None:
    """Makes running statistics equal to those of the last batch (`model.norm_statistics = "last"`).

    Raises:
        ConfigError: If the model has no batch norm.
    """
    norms = find_norms(model)
    if not norms:
        raise ConfigError(
            "model.norm_statistics", "last", "this model has no batch norm", "leave it out"
        )
    for norm in norms:
        norm.momentum = 1.0


class TorchNorm(nn.BatchNorm2d):
    """Batch norm with torch's kernels instead of cuDNN's, for ranks that share a GPU.

    cuDNN's training kernels for channels-last activations (`batchnorm_fwtr_nhwc_semiPersist` and the
    backward kernel) need all of their blocks on the GPU at the same time, two on every multiprocessor.
    A collective of another rank on the same GPU may wait for this rank and occupy some multiprocessors.
    Then both ranks wait forever.
    """

    def forward(self, images: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # torch.compile generates kernels without cuDNN
            return super().forward(images)
        with _without_cudnn():
            return super().forward(images)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


def use_torch_norms(model: nn.Module) -> int:
    """Converts every `BatchNorm2d` to a `TorchNorm` in place. Returns the number of converted layers."""
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    for norm in norms:
        norm.__class__ = TorchNorm
    return len(norms)


def normalized(x: Tensor, norm: _BatchNorm) -> tuple[Tensor, Callable[[], Tensor]]:
    """Returns norm(x), and a function that computes the same output again, bit for bit.

    The function uses the same operators, but no collective, and does not change running statistics.

    Args:
        x: Input of the batch norm.
        norm: Batch norm to apply.
    """
    if isinstance(norm, SyncedBatchNorm) and norm.is_shared:
        out, mean, variance = norm.forward_shared(x)
        moments = mean.detach(), variance.detach()
        return out, partial(_shared_again, x.detach(), *moments, norm)
    training = norm.training or norm.running_mean is None
    return norm(x), partial(_again, x.detach(), norm, training)


def _shared_again(x: Tensor, mean: Tensor, variance: Tensor, norm: _BatchNorm) -> Tensor:
    return _normalize(x, mean, variance, norm.weight, norm.bias, norm.eps)[0]


def _again(x: Tensor, norm: _BatchNorm, training: bool) -> Tensor:
    running = (None, None) if training else (norm.running_mean, norm.running_var)
    with _without_cudnn() if isinstance(norm, TorchNorm) else nullcontext():
        return F.batch_norm(x, *running, norm.weight, norm.bias, training, 0.0, norm.eps)
