"""One step over the communication module: overlapped buckets, parameters of every kind, dry backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import CommSettings
from paceline.comm.settings import HybridSettings
from paceline.core.errors import RunError
from paceline.optim.rule_settings import LarsSettings
from paceline.precision.settings import PrecisionSettings
from paceline.train.exchange_plan import DryBackward
from paceline.train.step import TrainStep
from paceline.train.weights import full_state, master_weights
from ranks import run_ranks
from train.steps import OPTIM, Made, alone, joined, make_step, same, snapshot, weights

# Every tensor alone: the most buckets, and the most that can be sent early.
HYBRID = CommSettings(algorithm="hybrid", owned={"hybrid": HybridSettings("1")}, fusion_mib=0.0)
RING16 = CommSettings(algorithm="ring", wire="float16", fusion_mib=0.0)
NATIVE = CommSettings(fusion_mib=0.0)
DTYPES = ("fp32", "fp16", "bf16")
SCALE = PrecisionSettings(loss_scale_init=1024.0)
DECAY = replace(OPTIM, weight_decay=0.1, decay_bias_norm=True)
LARS = replace(OPTIM, name="lars", weight_decay=1e-4, owned={"lars": LarsSettings(0.01)})


def closed(step: TrainStep) -> Tensor:
    """The masters; the step's thread and groups are given back."""
    step.exchange.close()
    return weights(step)


class Odd(nn.Module):
    """A weight under two names, a frozen layer, one that nobody uses, and one that rank 1 uses."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Conv2d(1, 1, 1).requires_grad_(False)
        self.first, self.second = nn.Linear(144, 144), nn.Linear(144, 144)
        self.second.weight = self.first.weight
        self.norm, self.fc = nn.BatchNorm1d(144), nn.Linear(144, 4)
        self.spare, self.never, self.use = nn.Linear(4, 4), nn.Linear(3, 3), use

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(self.frozen(images).flatten(1)).relu()
        out: Tensor = self.fc(self.norm(self.second(hidden)))
        return out + self.spare(out) if self.use else out


def _odd(
    rank: int, micro: int, comm: CommSettings | None, dtype: str, use: bool = True
) -> tuple[Tensor, int]:
    with joined() as group:
        made = Made(micro, comm=comm, optim=DECAY, dtype=dtype, precision=SCALE)
        step = make_step(group, model=Odd(use and rank == 1), made=made)
        before = snapshot(step)
        assert not any(step.run(number, 0.1).skipped for number in range(2))
        assert step.exchange.overlaps == (comm is not None)
        after = snapshot(step)
        for name in ("frozen.weight", "never.weight", "never.bias"):
            assert torch.equal(before[f"model {name}"], after[f"model {name}"]), name
        kept = torch.equal(before["model spare.weight"], after["model spare.weight"])
        assert kept == (not use), "decay, too, is for what some rank uses"
        return closed(step), len(step.exchange.plan.buckets)


@pytest.mark.parametrize("micro", [6, 2])
def test_tied_frozen_and_unused_parameters_train_as_in_the_flat_exchange(micro: int) -> None:
    """With micro-batches of 2 a step has three of them, and only the last may send."""
    found = []
    for comm in (None, NATIVE, HYBRID, RING16):
        (ours, buckets), (theirs, _) = run_ranks(2, _odd, micro, comm, "fp32")
        assert torch.equal(ours, theirs)
        # The weight with two names once, nothing of the frozen layer.
        assert buckets == (11 if comm else 1)
        found.append(ours)
    flat, native, hybrid, ring16 = found
    assert torch.equal(native, flat)  # two numbers have one sum
    torch.testing.assert_close(hybrid, flat, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ring16, flat, rtol=2e-3, atol=2e-3)
    assert not torch.equal(ring16, flat)


@pytest.mark.parametrize(
    ("dtype", "use"), [("fp16", True), ("fp16", False), ("bf16", True), ("fp32", False)]
)
def test_a_parameter_is_trained_alike_on_all_ranks_or_left_alone(dtype: str, use: bool) -> None:
    (ours, _), (theirs, _) = run_ranks(2, _odd, 6, None, dtype, use)
    assert torch.equal(ours, theirs)


def _four(rank: int, comm: CommSettings | None) -> Tensor:
    with joined() as group:
        step = make_step(group, made=Made(3, comm=comm, optim=DECAY))
        for number in range(3):  # the last is too short for all ranks
            step.run(number, 0.1)
        return closed(step)


def test_four_ranks_end_bit_identical_by_every_transport() -> None:
    flat = run_ranks(4, _four, None)[0]
    for comm in (HYBRID, RING16, replace(HYBRID, group_size=2)):
        results = run_ranks(4, _four, comm)
        assert all(torch.equal(found, results[0]) for found in results)
        torch.testing.assert_close(results[0], flat, rtol=2e-3, atol=2e-3)


def lars(dtype: str) -> Made:
    return Made(dtype=dtype, optim=LARS, precision=SCALE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_and_shared_parameters_are_exported_as_they_are(dtype: str) -> None:
    model = Odd(True)
    step = make_step(alone(), model=model, made=lars(dtype))
    frozen, trained = model.frozen.weight.clone(), model.first.weight.clone()
    assert not step.run(0, 0.1).skipped
    assert model.first.weight is model.second.weight
    assert not torch.equal(model.first.weight, trained)
    assert "frozen.weight" not in (*step.exchange.names, *step.names)
    state = full_state(model, step.optimizer)
    assert torch.equal(state["frozen.weight"], frozen.float())
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert {v.dtype for n, v in state.items() if "tracked" not in n} == {torch.float32}
    masters = master_weights(model, step.optimizer)
    assert masters.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_group_of_parameters_is_left_out(dtype: str) -> None:
    """No bias, no norm: the second group is empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4, bias=False))
    step = make_step(alone(), model=model, made=lars(dtype))
    assert len(step.optimizer.param_groups) == 1
    losses = [step.run(number, 0.05).loss for number in range(2)]
    assert losses[1] < losses[0]


def dry(step: TrainStep, forward: object) -> DryBackward:
    shape = (6, 12, 12, 1)
    return DryBackward(forward, step.policy, step.normalize, step.batch_norm, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_dry_backward_pass_leaves_no_trace(dtype: str) -> None:
    step = make_step(alone(), made=Made(dtype=dtype), dropout=0.5, norm=True)
    step.run(0, 0.1)
    before, state = snapshot(step), torch.get_rng_state()
    shapes: list[tuple[int, ...]] = []

    def forward(images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        return step.model(images)

    dry(step, forward)()
    assert shapes == [(6, 1, 12, 12)]
    assert same(before, snapshot(step))
    assert torch.equal(state, torch.get_rng_state())
    gradients = [parameter.grad for parameter in step.model.parameters()]
    assert all(gradient is not None for gradient in gradients), "it went through all layers"


def test_a_dry_backward_pass_raises_the_errors_of_a_first_step() -> None:
    step = make_step(alone())

    def forward(images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunError, match="out of memory at step 1 with a batch size of 6"):
        dry(step, forward)()
    with pytest.raises(TypeError):
        dry(step, lambda: None)()
