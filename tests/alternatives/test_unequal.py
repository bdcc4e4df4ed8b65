"""Unequal parts of the global batch: the division, the exact mean, and whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cli_runs import events
from paceline.alternatives.unequal.strategy import Unequal, apportion
from paceline.config import RunConfig
from paceline.core.errors import PacelineError, RunError
from paceline.core.events import Event, StepEvent
from paceline.data import BatchPlan
from paceline.train import Checkpoint, RunOutcome, run_training
from paceline.train.components import Components
from paceline.train.step import StepOutcome
from paceline.train.training import Training
from ranks import run_ranks
from refusals import refused
from small_runs import Silent, run_on_ranks, run_small, small_config


def test_shares_are_as_near_to_the_speeds_as_whole_samples_can_be() -> None:
    assert apportion(128, [1, 1, 1, 1]) == (32, 32, 32, 32)
    assert apportion(128, [2, 2, 2, 1], least=2) == (37, 37, 36, 18)
    assert apportion(128, [1, 1e-9], unit=4, least=2) == (120, 8)
    assert apportion(3, [5, 1, 1], least=2) == (1, 1, 1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_batches_of_all_ranks_are_the_global_batch(accumulation: int) -> None:
    micro = 4
    batch = 3 * micro * accumulation
    given = apportion(batch, [4, 4, 1], accumulation, 2)
    plan = BatchPlan(50, 2, batch, micro, 3, shares=given)
    for step in range(plan.total_steps):
        pieces = [piece for rank in range(3) for piece in plan.micro_batches(step, rank)]
        positions = [at for start, stop in sorted(pieces) for at in range(start, stop)]
        assert positions == list(range(*plan.step_range(step)))
        for rank in range(3):
            own = sum(stop - start for start, stop in plan.micro_batches(step, rank))
            length = plan.step_range(step)[1] - plan.step_range(step)[0]
            assert abs(own - Fraction(length * given[rank], batch)) < 1
            if length == batch:
                sizes = {stop - start for start, stop in plan.micro_batches(step, rank)}
                assert sizes == {plan.full_micro_batch(rank)}


REBALANCED: dict[str, Any] = {
    "run__strategy": "unequal", "run__unequal__shares": "1:1", "run__unequal__rebalance": True,
}  # fmt: skip


def linear(num_classes: int) -> nn.Module:
    """Returns a net without batch norm, whose statistics would depend on the division."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, num_classes))


def _train(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    config = small_config(output, **values)
    return run_training(config, Silent, components=Components(model=linear)).summary


def test_the_mean_is_exact_whatever_the_shares_are(tmp_path: Path) -> None:
    """Contract 1: the weights of a whole run are those of one process, up to the order of sums."""
    values: dict[str, Any] = {"optim__lr": 0.01}
    alone = _train(0, str(tmp_path / "alone"), values)
    uneven = values | {"run__strategy": "unequal", "run__unequal__shares": "3:1"}
    found = run_ranks(2, _train, str(tmp_path / "uneven"), uneven)[0]
    assert found["chosen"]["shares"] == "12:4 samples (given)"
    assert found["images"] == alone["images"] == 112
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("alone", "uneven"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)


def test_a_probe_decides_and_a_resumed_run_keeps_the_shares(tmp_path: Path) -> None:
    values = {"run__strategy": "unequal", "checkpoint__interval_steps": 3, "checkpoint__keep": 9}
    whole = run_on_ranks(2, tmp_path / "a", values)[0]
    assert "by speed" in whole["chosen"]["shares"]
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    given = Checkpoint.read(saved).strategy["unequal"]["shares"]
    assert sum(given) == 16
    resumed = values | {"run__resume": str(saved)}
    again = run_on_ranks(2, tmp_path / "b", resumed)[0]
    assert again["chosen"]["shares"].endswith("(as in the checkpoint)")
    assert again["weights_sha256"] == whole["weights_sha256"]


def with_slow_rank(rank: int, train: Callable[[], RunOutcome]) -> RunOutcome:
    """Trains with step times as if rank 1 were three times slower."""
    kept = Unequal.record

    def record(self: Unequal, outcome: StepOutcome) -> Mapping[str, Any]:
        slow = replace(outcome, step_s=3.0 if rank else 1.0, exposed_comm_s=0.0)
        return kept(self, slow)

    Unequal.record = record  # type: ignore[method-assign]
    try:
        return train()
    finally:
        Unequal.record = kept  # type: ignore[method-assign]


def _slow(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return with_slow_rank(rank, lambda: run_small(output, **values)).summary


def test_shares_are_decided_again_at_checkpoints(tmp_path: Path) -> None:
    values = {
        **REBALANCED, "checkpoint__interval_steps": 5,
        "checkpoint__keep": 9, "checkpoint__interval_epochs": 0,
    }  # fmt: skip
    whole = run_ranks(2, _slow, str(tmp_path / "a"), values)[0]
    assert whole["images"] == 112
    saved = tmp_path / "a/checkpoints/step-00000005.pt"
    assert Checkpoint.read(saved).strategy["unequal"]["shares"] == [12, 4]
    notes = [e["text"] for e in events(tmp_path / "a", "note")]
    assert "samples of each rank from step 5 on: 12:4" in notes
    again = run_ranks(2, _slow, str(tmp_path / "b"), values | {"run__resume": str(saved)})[0]
    assert again["weights_sha256"] == whole["weights_sha256"], "the checkpoint has the new shares"


class Graphs:
    """Stands for captured micro-steps of the previous size."""

    released = False

    def release(self) -> None:
        self.released = True


def _graphs(rank: int, output: str, values: dict[str, Any]) -> list[bool]:
    found: list[bool] = []
    kept, torch.cuda.synchronize = Training.replace_plan, lambda *_: None  # type: ignore[misc]

    def replace_plan(self: Training, plan: BatchPlan) -> None:
        self.step.micro._captured = held = Graphs()  # type: ignore[assignment]
        kept(self, plan)
        found.append(held.released and self.step.micro._captured is None)

    Training.replace_plan = replace_plan  # type: ignore[method-assign]
    _slow(rank, output, values)
    return found


def test_new_shares_drop_captured_graphs(tmp_path: Path) -> None:
    values = {**REBALANCED, "checkpoint__interval_steps": 5}
    assert run_ranks(2, _graphs, str(tmp_path), values) == [[True]] * 2


@pytest.mark.parametrize("text", ["fast", "1", "1:0", "1:-2", "1:nan", "", "1:1:1"])
def test_shares_that_say_nothing_are_refused(text: str) -> None:
    values = {"run.strategy": "unequal", "run.unequal.shares": text}
    with refused("run.unequal.shares"):
        Unequal.check(RunConfig().with_values(values), ranks=2)


class _FailingDisplay(Silent):
    """Fails at the fifth step."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 5:
            raise RunError("the display is gone", "bring it back")


def _fails(rank: int, output: str, values: dict[str, Any]) -> str:
    config = small_config(output, **values)
    with pytest.raises(PacelineError) as caught:
        with_slow_rank(rank, lambda: run_training(config, _FailingDisplay))
    return str(caught.value)


def test_the_save_before_an_error_keeps_the_shares(tmp_path: Path) -> None:
    """A new division would need an agreement of ranks, but the run ends."""
    values = {**REBALANCED}
    lines = run_ranks(2, _fails, str(tmp_path / "run"), values)
    assert len({line.removeprefix("rank 0: ") for line in lines}) == 1
    saved = Checkpoint.read(max((tmp_path / "run/checkpoints").glob("step-*.pt")))
    assert saved.progress["step"] >= 5
    assert saved.strategy["unequal"]["shares"] == [8, 8]
