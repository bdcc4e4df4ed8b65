"""`FilledModel`: a model's parameters, with a backward pass that computes nothing.

In: the name of a model. Out: a module with its parameters, whose backward hands over one gradient after
the other, last layer first, each filled with one number. What is left of a training step is the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings


class _Fill(torch.autograd.Function):
    """Passes a number on; the parameter's gradient is `value` everywhere."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = parameter.detach(), value
        return carried.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.value), None


class FilledModel(nn.Module):
    """Parameters in the order of the model's layers, sharing the memory of `weights`."""

    def __init__(self, weights: Sequence[tuple[str, Tensor]], value: float) -> None:
        super().__init__()
        self._value = value
        self._device = weights[0][1].device
        self.names = [name.replace(".", "/") for name, _ in weights]
        for name, (_, weight) in zip(self.names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self) -> Tensor:
        carried = torch.zeros((), device=self._device, requires_grad=True)
        for parameter in self.parameters():
            carried = _Fill.apply(carried, parameter, self._value)  # type: ignore[no-untyped-call]
        return carried


def model_weights(name: str, device: torch.device) -> list[tuple[str, Tensor]]:
    """Names and tensors of all that is trained; never changed, so that all may share them."""
    model = create_model(ModelSettings(name=name), num_classes=1000)
    return [(n, p.detach().to(device)) for n, p in model.named_parameters() if p.requires_grad]
