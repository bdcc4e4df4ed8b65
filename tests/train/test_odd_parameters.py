"""Parameters that a step must handle: frozen, zero, of one kind only, shared, with sparse gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.precision import PrecisionSettings
from paceline.train import TrainStep
from paceline.train.weights import full_state, master_weights
from ranks import run_ranks
from train.steps import OPTIM, Made, Net, alone, joined, make_step, same, snapshot

LARS = replace(OPTIM, name="lars", weight_decay=1e-4, trust_coefficient=0.01)
dtypes = pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])


def made(dtype: str, micro: int = 12) -> Made:
    scale = PrecisionSettings(loss_scale_init=1024.0)
    return Made(micro, dtype=dtype, optim=LARS, precision=scale)


def step_of(model: nn.Module, dtype: str) -> TrainStep:
    return make_step(alone(), model=model, made=made(dtype))


@dtypes
def test_a_frozen_parameter_is_neither_exchanged_nor_changed(dtype: str) -> None:
    model = Net()
    model.conv.weight.requires_grad_(False)
    step = step_of(model, dtype)
    frozen, trained = model.conv.weight.clone(), model.fc.weight.clone()
    for number in range(2):
        assert not step.run(number, 0.1).skipped
    assert torch.equal(model.conv.weight, frozen)
    assert not torch.equal(model.fc.weight, trained)
    assert "conv.weight" not in (*step.exchange.names, *step.update.names)
    state = full_state(model, step.update.optimizer)
    assert torch.equal(state["conv.weight"], frozen.float())
    assert {value.dtype for value in state.values()} == {torch.float32}
    masters = master_weights(model, step.update.optimizer)
    assert masters.keys() == dict(model.named_parameters()).keys()


@dtypes
def test_a_parameter_of_zeros_is_trained_at_the_global_rate(dtype: str) -> None:
    """A rate proportional to its norm would be 0, so that it could never change."""
    model = Net()
    nn.init.zeros_(model.conv.weight)
    nn.init.ones_(model.conv.bias)  # otherwise the ReLU would pass no gradient
    step = step_of(model, dtype)
    assert not step.run(0, 0.1).skipped
    ratios = dict(zip(step.update.names, step.update.optimizer.trust_ratios(), strict=True))
    assert ratios["conv.weight"] == 1.0 != ratios["fc.weight"]
    assert model.conv.weight.abs().sum() > 0
    assert model.conv.weight.isfinite().all()


@dtypes
def test_an_empty_group_is_left_out(dtype: str) -> None:
    torch.manual_seed(0)
    step = step_of(nn.Sequential(nn.Flatten(), nn.Linear(144, 4, bias=False)), dtype)
    assert len(step.update.optimizer.param_groups) == 1
    losses = [step.run(number, 0.05).loss for number in range(2)]
    assert losses[1] < losses[0]


@dtypes
def test_a_shared_parameter_has_one_gradient_and_one_master(dtype: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(144, 144), nn.Linear(144, 144)
    second.weight = first.weight
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(144, 4))
    step = step_of(model, dtype)
    before = first.weight.clone()
    assert not step.run(0, 0.1).skipped
    assert first.weight is second.weight
    assert not torch.equal(first.weight, before)
    assert len(step.update.optimizer.masters()) == len(list(model.parameters()))
    state = full_state(model, step.update.optimizer)
    assert torch.equal(state["1.weight"], state["3.weight"])


class Sparse(nn.Module):
    """Its table has gradients only for rows that were looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.table = Net(norm=True), nn.Embedding(5, 4, sparse=sparse)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        return logits + self.table(torch.zeros(len(images), dtype=torch.int64))


def _sparse(rank: int, everywhere: bool) -> tuple[str, bool]:
    with joined() as group:
        step = make_step(group, model=Sparse(everywhere or rank == 1), made=made("fp16", 6))
        before = snapshot(step)
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        return str(caught.value), same(before, snapshot(step))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(everywhere: bool) -> None:
    (line, kept), (other, kept_there) = run_ranks(2, _sparse, everywhere)
    assert line == other
    assert "table.weight is sparse" in line
    assert kept
    assert kept_there
