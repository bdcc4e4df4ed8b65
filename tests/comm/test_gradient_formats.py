"""The exchange of half-precision gradients: formats, accumulation in fp32, and who had a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import agreed, alone, joined, uses
from paceline.comm.gradient_exchange import GradientExchange, Signals
from ranks import run_ranks


def mixed(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Half weights, fp32 biases, as `Policy.convert` leaves a net."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2))
    for layer in model:
        layer.weight.data = layer.weight.data.to(dtype)
    return model


def put(parameter: nn.Parameter, value: float) -> None:
    """What a backward pass leaves."""
    parameter.grad = torch.full_like(parameter, value)


def test_formats_get_a_buffer_each_and_signals_travel_in_float32() -> None:
    halves = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).half())
    exchange = GradientExchange(halves.named_parameters(), alone())
    assert set(exchange.buffers) == {"float16", "float32"}
    assert agreed(exchange, 0.1).loss == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights_and_fp32_rest_travel_apart(dtype: torch.dtype) -> None:
    model = mixed(dtype).to(memory_format=torch.channels_last)
    exchange = GradientExchange(model.named_parameters(), alone())
    exchange.begin()
    for number, parameter in enumerate(model.parameters()):
        put(parameter, 1.5 + number)
    exchange.gather()
    agreed(exchange, 0.3)
    half = str(dtype).removeprefix("torch.")
    assert set(exchange.layouts) == {half, "float32"}
    assert [slot.name for slot in exchange.layouts[half]] == ["1.weight", "0.weight"]
    for number, (name, parameter) in enumerate(model.named_parameters()):
        grad = parameter.grad
        assert grad is not None
        assert grad.dtype == parameter.dtype
        assert grad.stride() == parameter.stride()
        assert grad.unique().tolist() == [1.5 + number], name
        home = exchange.buffers[half if name.endswith("weight") else "float32"]
        assert grad.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()


def test_micro_steps_add_up_in_fp32_and_are_rounded_once() -> None:
    """fp16 has steps of 2 above 2048: added there, each 0.5 would be lost."""
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    exchange.begin()
    for value in (2048.0, *(0.5,) * 16):
        for parameter in model.parameters():
            put(parameter, value)
        exchange.gather()
    agreed(exchange)
    assert model[0].weight.grad.unique().tolist() == [2056.0]  # type: ignore[union-attr]
    assert model[0].bias.grad.unique().tolist() == [2056.0]  # type: ignore[union-attr]
    lost = torch.tensor(2048.0, dtype=torch.float16)
    for _ in range(16):
        lost += 0.5
    assert float(lost) == 2048.0


def test_a_sum_beyond_fp16_becomes_infinite_and_not_less() -> None:
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    exchange.begin()
    for _ in range(2):
        for parameter in model.parameters():
            put(parameter, 40000.0)
        exchange.gather()
    agreed(exchange)
    assert torch.isinf(model[1].weight.grad).all()  # type: ignore[arg-type]
    assert model[1].bias.grad.unique().tolist() == [80000.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_parameter_that_one_micro_step_does_not_reach_keeps_its_sum(missing: int) -> None:
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    exchange.begin()
    for turn, value in enumerate((1.0, 2.0, 4.0)):
        for name, parameter in model.named_parameters():
            if turn != missing or not name.startswith("1"):
                put(parameter, value)
        exchange.gather()
    agreed(exchange)
    assert model[0].weight.grad.unique().tolist() == [7.0]  # type: ignore[union-attr]
    for parameter in model[1].parameters():
        assert parameter.grad is not None
        assert parameter.grad.unique().tolist() == [7.0 - 2.0**missing]
    assert uses(exchange) == dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), 1.0)


def _partly_used(rank: int, accumulate: bool) -> tuple[dict[str, float], list[Tensor]]:
    """Layer 0 has a gradient on rank 1 alone, layer 1 on both, layer 2 nowhere."""
    with joined() as group:
        model = nn.Sequential(*mixed(), nn.Linear(2, 2).half())
        exchange = GradientExchange(model.named_parameters(), group, accumulate=accumulate)
        exchange.begin()
        for parameter in model[1].parameters():
            put(parameter, 1.0 + rank)
        if rank == 1:
            for parameter in model[0].parameters():
                put(parameter, 5.0)
        exchange.gather()
        exchange.reduce(torch.zeros(()), Signals())
        found = [p.grad.float().unique() for p in model.parameters() if p.grad is not None]
        return uses(exchange), found


@pytest.mark.parametrize("accumulate", [False, True])
def test_uses_count_the_ranks_that_had_a_gradient(accumulate: bool) -> None:
    for counts, found in run_ranks(2, _partly_used, accumulate):
        assert counts == {
            "0.weight": 1.0, "0.bias": 1.0, "1.weight": 2.0, "1.bias": 2.0,
            "2.weight": 0.0, "2.bias": 0.0,
        }  # fmt: skip
        assert [values.tolist() for values in found] == [[5.0]] * 2 + [[3.0]] * 2 + [[0.0]] * 2


def _overflow(rank: int) -> list[bool]:
    with joined() as group:
        model = mixed()
        exchange = GradientExchange(model.named_parameters(), group)
        exchange.begin()
        for parameter in model.parameters():
            put(parameter, float("inf") if rank == 1 and parameter is model[0].weight else 1.0)
        exchange.gather()
        exchange.reduce(torch.zeros(()), Signals())
        return [bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None]


def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    assert run_ranks(2, _overflow) == [[False, True, True, True]] * 2


def test_a_replayed_graph_tells_what_it_gathered() -> None:
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone())
    exchange.begin()
    exchange.note_replay(["1.weight", "1.bias"], sent=0)
    assert exchange.gathered == {"1.weight", "1.bias"}
    agreed(exchange)
    assert uses(exchange) == {"0.weight": 0.0, "0.bias": 0.0, "1.weight": 1.0, "1.bias": 1.0}
