"""Muon in the step and in whole runs: ranks, micro-batches, formats, and one kind of device for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.train import step_parts
from paceline.train.step import StepOutcome
from paceline.train.weights import master_weights
from ranks import run_ranks
from small_runs import run_small
from train.steps import OPTIM, Made, Net, alone, joined, make_step, same, snapshot, train, weights

MUON = replace(OPTIM, name="muon", weight_decay=1e-3, trust_coefficient=0.05, nesterov=True)
RUN: dict[str, Any] = {"optim__name": "muon", "optim__trust_coefficient": 0.05}


def made(micro: int = 12, dtype: str = "fp32", orthogonal: str = "filters") -> Made:
    return Made(micro, dtype=dtype, optim=replace(MUON, orthogonal=orthogonal))


class Mixed(nn.Module):
    """Linear layers before convolutions: the optimizer's groups turn the order round."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.first = nn.Conv2d(1, 4, 3)
        self.turn = nn.Linear(10, 10)
        self.second = nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(256, 4)

    def forward(self, images: Tensor) -> Tensor:
        inner = self.turn(self.first(self.mix(images)).relu())
        logits: Tensor = self.fc(self.second(inner).relu().flatten(1))
        return logits


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_masters_are_those_of_their_own_weights(dtype: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    drawn = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = make_step(alone(), model=model, made=made(dtype=dtype))
    for name, master in master_weights(model, step.update.optimizer).items():
        assert torch.equal(master, drawn[name]), name
    assert not step.run(0, 0.1).skipped


def _train_on_rank(rank: int, how: Made) -> tuple[Tensor, list[float]]:
    with joined() as group:
        return train(group, made=how)


@pytest.mark.parametrize("orthogonal", ["filters", "all"])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 6), (3, 2)])
def test_many_ranks_take_the_step_of_one_process(ranks: int, micro: int, orthogonal: str) -> None:
    whole, losses = train(alone(), made=made(orthogonal=orthogonal))
    results = run_ranks(ranks, _train_on_rank, made(micro, orthogonal=orthogonal))
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        torch.testing.assert_close(trained, whole, rtol=1e-4, atol=1e-5)
        assert their_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_accumulation_equals_one_large_batch(micro: int) -> None:
    whole, _ = train(alone(), made=made())
    torch.testing.assert_close(train(alone(), made=made(micro))[0], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_stays_near_full(dtype: str) -> None:
    whole, losses = train(alone(), made=made())
    half, half_losses = train(alone(), made=made(dtype=dtype))
    assert half_losses == pytest.approx(losses, rel=0.02)
    assert float((half - whole).norm() / whole.norm()) < 0.05


def _poisoned(rank: int, dtype: str) -> tuple[list[StepOutcome], bool, Tensor]:
    with joined() as group:
        step = make_step(group, made=made(6, dtype), norm=True)
        model = step.model
        assert isinstance(model, Net)
        first = step.run(0, 0.1)
        before = snapshot(step)
        model.poison = float("inf") if rank == 1 else 0.0
        second = step.run(1, 0.1)
        kept = same(before, snapshot(step))
        model.poison = 0.0
        return [first, second, step.run(2, 0.1)], kept, weights(step)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(dtype: str) -> None:
    results = run_ranks(2, _poisoned, dtype)
    for outcomes, kept, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert kept
        assert trained.isfinite().all()
        assert torch.equal(trained, results[0][2])


def test_a_run_says_so_and_logs_ratios(tmp_path: Path) -> None:
    done = run_small(tmp_path / "run", **RUN, optim__trust_log_interval=3)
    assert done.summary["chosen"]["optimizer"] == "muon, foreach"
    assert done.summary["skipped_steps"] == 0
    assert '"event": "trust"' in (tmp_path / "run/metrics.jsonl").read_text()


def test_a_run_goes_on_only_with_the_same_weights_made_orthogonal(tmp_path: Path) -> None:
    run_small(tmp_path / "run", **RUN)
    line = r"has optim\.orthogonal = 'filters', this run 'all'; resume with the checkpoint's"
    with pytest.raises(PacelineError, match=line):
        run_small(tmp_path / "run", **RUN, run__resume="auto", optim__orthogonal="all")


def _on_other_devices(rank: int, output: str) -> str:
    step_parts._computes = lambda device: f"GPU {rank}"
    try:
        with pytest.raises(PacelineError) as caught:
            run_small(output, **RUN)
    finally:
        step_parts._computes = _COMPUTES
    return str(caught.value)


_COMPUTES = step_parts._computes


def test_ranks_on_other_devices_are_refused(tmp_path: Path) -> None:
    for line in run_ranks(2, _on_other_devices, str(tmp_path / "run")):
        assert "ranks differ in what computes: 'GPU 0' on rank 0, 'GPU 1' on rank 1" in line
        assert "or use lars" in line


def test_what_computes_on_a_cpu() -> None:
    assert f"with {torch.get_num_threads()} threads" in _COMPUTES(torch.device("cpu"))
