"""Parameters that a step must bear: frozen, zero, of one kind only, with sparse gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.precision.settings import PrecisionSettings
from paceline.train.weights import full_state, master_weights
from ranks import run_ranks
from train.steps import OPTIM, Made, Net, alone, joined, make_step, same, snapshot

DTYPES = ("fp32", "fp16", "bf16")
LARS = replace(OPTIM, name="lars", weight_decay=1e-4, trust_coefficient=0.01)


def made(dtype: str, **more: object) -> Made:
    scale = PrecisionSettings(loss_scale_init=1024.0)
    return replace(Made(dtype=dtype, optim=LARS, precision=scale), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_parameter_is_neither_sent_nor_changed(dtype: str) -> None:
    model = Net()
    model.conv.weight.requires_grad_(False)
    step = make_step(alone(), model=model, made=made(dtype))
    frozen, trained = model.conv.weight.clone(), model.fc.weight.clone()
    for number in range(2):
        assert not step.run(number, 0.1).skipped
    assert torch.equal(model.conv.weight, frozen)
    assert not torch.equal(model.fc.weight, trained)
    assert "conv.weight" not in step.exchange.names
    assert "conv.weight" not in step.update.names
    state = full_state(model, step.update.optimizer)
    assert torch.equal(state["conv.weight"], frozen.float())
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert (
        master_weights(model, step.update.optimizer).keys() == dict(model.named_parameters()).keys()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_of_zeros_is_trained_at_the_plain_rate(dtype: str) -> None:
    """Its norm is 0, and so would be any rate that is proportional to it: it could never leave."""
    model = Net()
    nn.init.zeros_(model.conv.weight)
    nn.init.ones_(model.conv.bias)  # else the ReLU would let no gradient through
    step = make_step(alone(), model=model, made=made(dtype))
    assert not step.run(0, 0.1).skipped
    ratios = dict(zip(step.update.names, step.update.optimizer.trust_ratios(), strict=True))
    assert ratios["conv.weight"] == 1.0
    assert ratios["fc.weight"] != 1.0
    assert model.conv.weight.abs().sum() > 0
    assert model.conv.weight.isfinite().all()


class Weights(nn.Module):
    """No bias, no norm: the second group of parameters is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(144, 4, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(images.flatten(1))
        return logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_group_is_left_out(dtype: str) -> None:
    torch.manual_seed(0)
    step = make_step(alone(), model=Weights(), made=made(dtype))
    assert len(step.update.optimizer.param_groups) == 1
    losses = [step.run(number, 0.05).loss for number in range(2)]
    assert losses[1] < losses[0]


class Shared(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 144), nn.Linear(144, 144)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(144, 4)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.second(self.first(images.flatten(1)).relu()))
        return logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_parameter_has_one_gradient_and_one_master(dtype: str) -> None:
    torch.manual_seed(0)
    model = Shared()
    step = make_step(alone(), model=model, made=made(dtype))
    before = model.first.weight.clone()
    assert not step.run(0, 0.1).skipped
    assert model.first.weight is model.second.weight
    assert not torch.equal(model.first.weight, before)
    assert len(step.update.optimizer.masters()) == len(list(model.parameters()))
    state = full_state(model, step.update.optimizer)
    assert torch.equal(state["first.weight"], state["second.weight"])


class Sparse(nn.Module):
    """Its table has gradients for the rows that were looked up, and no others."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.table = Net(norm=True), nn.Embedding(5, 4, sparse=sparse)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        return logits + self.table(torch.zeros(len(images), dtype=torch.int64))


def _sparse(rank: int, everywhere: bool) -> tuple[str, bool]:
    with joined() as group:
        step = make_step(group, model=Sparse(everywhere or rank == 1), made=made("fp16", micro=6))
        before = snapshot(step)
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        return str(caught.value), same(before, snapshot(step))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(everywhere: bool) -> None:
    (line, kept), (other, kept_there) = run_ranks(2, _sparse, everywhere)
    assert line == other
    assert line.endswith(
        "the gradient of table.weight is sparse; make it dense, as with nn.Embedding(sparse=False)"
    )
    assert kept
    assert kept_there
