"""Batch norm, sum, ReLU and pool as separate operators in float64, to compare the fused kernels
with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Fused = Callable[[Tensor, nn.BatchNorm2d, Tensor | None], tuple[Tensor, ...]]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def away(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def random_map(
    shape: tuple[int, ...], kind: torch.dtype, mean: float = 0.3, seed: int = 0
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) + mean).to(kind)


def norm_for(channels: int) -> nn.BatchNorm2d:
    """A norm whose γ and β are all different, some γ negative."""
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 1.5, channels) if channels > 1 else torch.ones(1))
        norm.bias.copy_(torch.linspace(0.4, -0.3, channels))
    return norm


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float, name: str = "") -> None:
    """Within `tolerance` of the largest element."""
    assert ours.shape == theirs.shape, name
    ours, theirs = ours.detach().double(), theirs.detach().double()
    away = (ours - theirs).abs().max()
    limit = tolerance * max(1.0, float(theirs.abs().max()))
    assert away <= limit, f"{name}: off by {float(away):.3g}, allowed {limit:.3g}"


@dataclass
class Found:
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    norm: nn.BatchNorm2d


class Wanted:
    """Inputs with their exact outputs, gradients and statistics."""

    def __init__(
        self, shape: tuple[int, ...], kind: torch.dtype, *, residual: bool = False, relu: bool = True,
        pooled: bool = False, padding: int = 1, offset: bool = False, uses: tuple[int, ...] = (0,),
        mean: float = 0.3, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.x = channels_last(random_map(shape, kind, mean)).to(device)
        self.residual = (
            channels_last(random_map(shape, kind, 0.1, 1)).to(device) if residual else None
        )
        # The bias of a convolution in front of the norm.
        self.offset = torch.linspace(-2, 3, shape[1], device=device) if offset else None
        self.uses, self.device = uses, device
        norm = norm_for(shape[1]).double().to(device)
        x = self.x.double().requires_grad_()
        extra = self.residual.double().requires_grad_() if self.residual is not None else None
        y = norm(x if self.offset is None else x + self.offset.double().view(1, -1, 1, 1))
        y = y if extra is None else y + extra
        y = y.relu() if relu else y
        self.output = F.max_pool2d(y, 3, 2, padding) if pooled else y
        # A gradient for each use, whatever its memory order.
        self.incoming = {
            use: random_map(tuple(self.output.shape), kind, 0.2, 2 + use).to(device) for use in uses
        }
        total = torch.stack([grad.double() for grad in self.incoming.values()]).sum(0)
        self.output.backward(total)
        self.gradients = {"x": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
        if extra is not None and extra.grad is not None:
            self.gradients["residual"] = extra.grad
        self.norm = norm

    def check(self, found: Found, tolerance: float, statistics: float = 1e-5) -> None:
        for output in found.outputs:
            assert output.dtype == self.x.dtype
            assert output.is_contiguous(memory_format=torch.channels_last)
            assert_near(output, self.output, tolerance, "output")
        assert found.gradients.keys() == self.gradients.keys()
        for name, gradient in found.gradients.items():
            scale = 3 if name in ("weight", "bias") else 1  # sums of many rounded products
            assert_near(gradient, self.gradients[name], scale * tolerance, f"gradient of {name}")
        for name in ("running_mean", "running_var"):
            assert_near(getattr(found.norm, name), getattr(self.norm, name), statistics, name)
        assert found.norm.num_batches_tracked == self.norm.num_batches_tracked == 1


def ours(wanted: Wanted, fused: Fused) -> Found:
    """The same through the kernels."""
    norm = norm_for(wanted.x.shape[1]).to(wanted.device)
    x = wanted.x.clone(memory_format=torch.preserve_format).requires_grad_()
    residual = None
    if wanted.residual is not None:
        residual = wanted.residual.clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = fused(x, norm, residual)
    torch.autograd.backward(
        [outputs[use] for use in wanted.uses], [wanted.incoming[use] for use in wanted.uses]
    )
    tensors = {"x": x, "weight": norm.weight, "bias": norm.bias, "residual": residual}
    gradients = {
        name: tensor.grad
        for name, tensor in tensors.items()
        if tensor is not None and tensor.grad is not None
    }
    return Found(outputs, gradients, norm)
