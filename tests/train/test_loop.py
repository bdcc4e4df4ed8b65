from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.core.events import read_events
from paceline.core.host_load import LoadReading
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.report.expectation import bound_by
from paceline.report.run_files import RunFiles
from paceline.train import loop
from paceline.train.checkpoint import Checkpoint
from paceline.train.step import StepOutcome, TrainStep
from small_runs import run_small


class FixedLoad:
    """In place of the host's own accounts."""

    latest: LoadReading | None = None

    def read(self) -> LoadReading | None:
        return self.latest


class BusyLoad(FixedLoad):
    latest = LoadReading(waited=0.7, others=0.8, throttled=0.0, cores=2)


def test_an_overloaded_host_is_noted_once_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "HostLoad", BusyLoad)
    run_small(tmp_path / "run", run__epochs=2, data__synthetic_samples=16)
    events = list(read_events(tmp_path / "run/metrics.jsonl"))
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert len([text for text in notes if "overloaded" in text and "stop other work" in text]) == 1
    steps = [event for event in events if event["event"] == "step"]
    assert {step["core_wait_share"] for step in steps} == {0.7}
    assert "overloaded host" in str(bound_by(RunFiles.read(tmp_path / "run")))


def test_remarks_of_both_loaders_are_told_once_also_where_an_error_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "HostLoad", FixedLoad)
    monkeypatch.setattr(TrainLoader, "remark", lambda self: "3 on the host")
    monkeypatch.setattr(EvalLoader, "remark", lambda self: "2 on the host")
    evaluate, calls = loop.evaluate, []

    def twice(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise PacelineError("the disk is gone")
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "evaluate", twice)
    with pytest.raises(PacelineError, match="the disk is gone"):
        run_small(tmp_path / "run", run__epochs=3, data__synthetic_samples=16)
    events = list(read_events(tmp_path / "run/metrics.jsonl"))
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes == ["evaluation: 2 on the host", "3 on the host"]


@pytest.mark.parametrize(
    ("skipped", "train_loss", "val_loss", "best_step"),
    [
        ({7}, 1.0, 1.0, 7),  # an isolated overflow leaves sound weights
        ({5, 7}, 1.0, 1.0, 7),
        ({6, 7}, 1.0, 1.0, 4),
        ({7}, float("inf"), 1.0, 4),
        ({7}, 1.0, float("nan"), 4),
    ],
)
def test_only_skips_in_a_row_and_a_loss_that_is_not_finite_bar_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    skipped: set[int], train_loss: float, val_loss: float, best_step: int,
) -> None:  # fmt: skip
    """Evaluations after steps 4 and 7; the second scores higher."""
    evaluate, collect, scores = loop.evaluate, TrainStep.collect, [(10.0, 1.0), (90.0, val_loss)]

    def scored(*arguments: Any) -> Any:
        top1, loss = scores.pop(0)
        return replace(evaluate(*arguments), top1=top1, loss=loss)  # type: ignore[type-var]

    def collected(step: TrainStep) -> StepOutcome:
        outcome = collect(step)
        if outcome.number + 1 not in skipped:
            return outcome
        return replace(outcome, skipped=True, loss=train_loss)

    monkeypatch.setattr(loop, "evaluate", scored)
    monkeypatch.setattr(TrainStep, "collect", collected)
    summary = run_small(tmp_path / "run").summary
    assert summary["steps"] == 7
    assert (summary["best_step"], summary["skipped_steps"]) == (best_step, len(skipped))
    assert Checkpoint.read(tmp_path / "run/checkpoints/best.pt").step == best_step
