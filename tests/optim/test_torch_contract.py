"""Interfaces of torch's optimizers: named parameters, a compiled step, ZeroRedundancyOptimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import PacelineError
from paceline.optim import LAMB, LARS, SGD, AdamW, MasterOptimizer, Muon
from ranks import run_ranks

every = pytest.mark.parametrize("of", [SGD, LARS, Muon, AdamW, LAMB])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: Any, step: Any = None) -> list[Tensor]:
    for number in range(3):
        optimizer.zero_grad()
        images = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(number))
        model(images).square().mean().backward()
        (step or optimizer.step)()
    return [p.detach().clone() for p in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every
def test_named_parameters(of: type[MasterOptimizer]) -> None:
    model = net()
    named = of(model.named_parameters(), lr=0.01)  # type: ignore[call-arg]
    held = [name for group in named.param_groups for name in group["param_names"]]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    by_name = dict(model.named_parameters())
    for group in named.param_groups:
        assert all(
            by_name[n] is p for n, p in zip(group["param_names"], group["params"], strict=True)
        )


def test_maximize_is_refused_in_groups_and_states_of_torch() -> None:
    model = net()
    groups = [{"params": list(model.parameters()), "maximize": True}]
    with pytest.raises(PacelineError, match="maximize = True"):
        train(model, AdamW(groups))
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), maximize=True).state_dict())
    with pytest.raises(PacelineError, match="maximize = True"):
        train(model, optimizer)


@pytest.mark.parametrize("of", [AdamW, LAMB, Muon])
def test_a_compiled_step_has_the_same_bits(of: Any) -> None:
    model, other = net(), net()
    optimizer = of(other.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = train(other, optimizer, torch.compile(optimizer.step, backend="eager"))
    assert equal(compiled, train(model, of(model.parameters(), lr=0.01)))


def _sharded(rank: int) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    found = []
    with pl.init(device="cpu", timeout_s=120):
        for of in (Muon, AdamW, LARS):
            model, other = net(), net()
            sharded = ZeroRedundancyOptimizer(other.parameters(), of, lr=0.01)
            found.append(
                equal(train(model, of(model.parameters(), lr=0.01)), train(other, sharded))
            )
    return found


def test_zero_redundancy_optimizer() -> None:
    assert run_ranks(2, _sharded) == [[True] * 3] * 2
