from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from paceline.comm.gradient_exchange import GradientExchange, Signals
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.plan import FusionBuffer, FusionPlan
from ranks import run_ranks


def _alone() -> Group:
    return Group(Topology(), CommSettings(), torch.device("cpu"))


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4))


def _two_ranks(rank: int) -> tuple[list[torch.Tensor], list[float]]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        net = _net()
        exchange = GradientExchange(net.named_parameters(), group)
        torch.manual_seed(rank)
        net(torch.randn(2, 3, 8, 8)).square().sum().backward()
        agreed = exchange.reduce(Signals(loss=0.5 + rank, terminate=float(rank)))
        return [p.grad.clone() for p in net.parameters() if p.grad is not None], agreed.to_list()
    finally:
        group.close()


def test_the_sum_over_ranks_is_exact_and_identical() -> None:
    (first, signals), (second, _) = run_ranks(2, _two_ranks)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    net = _net()
    expected = [torch.zeros_like(p) for p in net.parameters()]
    for rank in range(2):
        torch.manual_seed(rank)
        net.zero_grad()
        net(torch.randn(2, 3, 8, 8)).square().sum().backward()
        for total, parameter in zip(expected, net.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    for ours, want in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, want)
    assert Signals(*signals) == Signals(loss=2.0, terminate=1.0)


def test_gradients_are_views_that_backward_fills_without_a_copy() -> None:
    net = _net().to(memory_format=torch.channels_last)
    exchange = GradientExchange(net.named_parameters(), _alone())
    before = [p.grad.data_ptr() for p in net.parameters() if p.grad is not None]
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(2):  # two micro-steps add up in place
        net(images).square().sum().backward()
    assert [p.grad.data_ptr() for p in net.parameters() if p.grad is not None] == before
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    flat = exchange.gradients[0]
    assert float(flat.norm()) == pytest.approx(
        float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm())
    )
    exchange.zero()
    assert float(weight.grad.abs().sum()) == 0


def test_the_last_layer_lies_first() -> None:
    exchange = GradientExchange(_net().named_parameters(), _alone())
    assert exchange.plan.tensors == ("3.bias", "3.weight", "0.bias", "0.weight")


def test_frozen_parameters_stay_out_and_unused_ones_are_zero() -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2), "ice": nn.Linear(2, 2)})
    net["ice"].requires_grad_(False)
    exchange = GradientExchange(net.named_parameters(), _alone())
    net["used"](torch.ones(1, 2)).sum().backward()
    exchange.reduce(Signals())
    assert net["ice"].weight.grad is None
    assert float(net["idle"].weight.grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert float(net["used"].weight.grad.abs().sum()) > 0  # type: ignore[union-attr]


def test_formats_get_a_buffer_each_and_signals_travel_in_float32() -> None:
    net = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).half())
    exchange = GradientExchange(net.named_parameters(), _alone())
    assert set(exchange.buffers) == {"float16", "float32"}
    assert exchange.reduce(Signals(loss=0.1)).loss == pytest.approx(0.1)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = FusionPlan((FusionBuffer(("0.weight",)),))
    with pytest.raises(ConfigError, match="plan: lacks"):
        GradientExchange(_net().named_parameters(), _alone(), plan)
