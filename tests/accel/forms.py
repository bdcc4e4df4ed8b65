"""Nets that compute in the forms of `paceline.accel`, so that tests can compare them with plain ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from paceline.accel.forward import Forward
from paceline.accel.implementation_choice import Choices
from paceline.accel.networks import ConvNorm, Network, network_of, part_of


def _identity(maps: Tensor) -> Tensor:
    return maps


class Chain(nn.Module):
    """Residual blocks, perhaps with a convolution and a norm in front."""

    def __init__(self, *blocks: nn.Module, stem: tuple[nn.Module, nn.Module] | None = None) -> None:
        super().__init__()
        if stem is not None:
            self.conv, self.bn = stem
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "bn"):
            x = self.bn(self.conv(x)).relu_()
        return self.blocks(x)


def store_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all fused blocks store their outputs."""
    from paceline.accel.fused_blocks import DeferredOutput

    reduced = DeferredOutput.reduced

    def keeping(pending: DeferredOutput, *given: Any) -> Any:
        pending.recompute = False
        return reduced(pending, *given)

    monkeypatch.setattr(DeferredOutput, "reduced", keeping)


def network(net: nn.Module) -> Network:
    if isinstance(net, Chain):
        # With hooks or a bias, the convolution in front is one like others.
        stem = [ConvNorm(net.conv, net.bn)] if hasattr(net, "bn") else []  # type: ignore[arg-type]
        return Network((*stem, *map(part_of, net.blocks)), _identity)
    found = network_of(net)
    assert found is not None
    return found


def use_forms(
    net: nn.Module, *, fused: bool = False, recompute: bool = False, choices: Choices | None = None
) -> Any:
    """Lets `net` compute in these forms, or by itself if there are none. Returns its forward pass."""
    net.__dict__.pop("forward", None)
    if fused:
        from paceline.accel.fused_forward import FusedForward

        net.forward = FusedForward(network(net), recompute=recompute, choices=choices)
    elif recompute:
        net.forward = Forward(network(net), recompute=True)
    return net.forward
