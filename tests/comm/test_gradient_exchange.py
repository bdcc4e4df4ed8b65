from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import agreed, alone, grads, joined, net, uses
from paceline.comm.gradient_exchange import SIGNALS, GradientExchange, Signals
from paceline.core.errors import ConfigError
from paceline.plan import FusionBuffer, FusionPlan
from ranks import run_ranks


def _two_ranks(rank: int) -> tuple[list[Tensor], Signals]:
    with joined() as group:
        model = net()
        exchange = GradientExchange(model.named_parameters(), group)
        torch.manual_seed(rank)
        exchange.begin()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        exchange.gather()
        told = agreed(exchange, 0.5 + rank, terminate=float(rank))
        return grads(model), told


def test_the_sum_over_ranks_is_exact_and_identical() -> None:
    (first, signals), (second, _) = run_ranks(2, _two_ranks)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    model = net()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(2):
        torch.manual_seed(rank)
        model.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        for total, own in zip(expected, grads(model), strict=True):
            total += own
    for ours, want in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, want)
    assert signals == Signals(loss=2.0, terminate=1.0)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_views_of_the_buffer_with_the_parameters_strides(passes: int) -> None:
    model = net().to(memory_format=torch.channels_last)
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=passes > 1)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model(images).square().sum().backward()
    once = grads(model)
    exchange.begin()
    for _ in range(passes):  # micro-steps add up
        model(images).square().sum().backward()
        exchange.gather()
        assert all(p.grad is None for p in model.parameters())
    exchange.reduce(torch.zeros(()), Signals())
    buffer = exchange.buffers["float32"]
    for parameter, want in zip(model.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        torch.testing.assert_close(parameter.grad, passes * want)
    assert model[0].weight.stride() != model[0].weight.contiguous().stride()
    total = torch.cat([grad.flatten() for grad in once]).norm()
    assert float(exchange.gradients[0].norm()) == pytest.approx(passes * float(total), rel=1e-6)


def test_nothing_of_a_step_is_left_in_the_next() -> None:
    model = net()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    for step in range(2):
        exchange.begin()
        if step == 0:
            model(torch.randn(2, 3, 8, 8)).square().sum().backward()
            exchange.gather()
        agreed(exchange, float(step == 0), abandon=float(step == 0))
    assert float(exchange.gradients[0].abs().sum()) == 0
    assert exchange.tail.tolist() == [0.0] * (len(SIGNALS) + 4)


def test_the_last_layer_lies_first() -> None:
    exchange = GradientExchange(net().named_parameters(), alone())
    assert exchange.plan.tensors == ("3.bias", "3.weight", "0.bias", "0.weight")


def test_frozen_parameters_stay_out_and_unused_ones_are_zero() -> None:
    parts = nn.ModuleDict(
        {"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2), "ice": nn.Linear(2, 2)}
    )
    parts["ice"].requires_grad_(False)
    exchange = GradientExchange(parts.named_parameters(), alone())
    for view in exchange.gradients:
        view.fill_(7.0)  # what an earlier step left
    exchange.begin()
    parts["used"](torch.ones(1, 2)).sum().backward()
    exchange.gather()
    agreed(exchange)
    assert parts["ice"].weight.grad is None
    assert float(parts["idle"].weight.grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert float(parts["used"].weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    assert uses(exchange) == {
        "used.weight": 1.0, "used.bias": 1.0, "idle.weight": 0.0, "idle.bias": 0.0
    }  # fmt: skip


def _signals_of(rank: int) -> list[Signals]:
    with joined() as group:
        exchange = GradientExchange(net().named_parameters(), group)
        told = []
        for own in ({"fault": 1.0}, {"abandon": 1.0}, {"interrupt": 1.0}, {"corrupt": 3.0}, {}):
            exchange.begin()
            told.append(agreed(exchange, 1.0, **(own if rank == 1 else {})))
        return told


def test_every_signal_of_one_rank_reaches_all_and_none_lives_on() -> None:
    told = [
        Signals(loss=2.0, fault=1.0),
        Signals(loss=2.0, abandon=1.0),
        Signals(loss=2.0, interrupt=1.0),
        Signals(loss=2.0, corrupt=3.0),
        Signals(loss=2.0),
    ]
    assert run_ranks(2, _signals_of) == [told, told]


def test_a_plan_for_another_model_is_refused() -> None:
    plan = FusionPlan((FusionBuffer(("0.weight",)),))
    with pytest.raises(ConfigError, match="plan: lacks"):
        GradientExchange(net().named_parameters(), alone(), plan)
