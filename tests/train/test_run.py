"""Whole small runs: numeric contract 3, files, notes, the best checkpoint, divergence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import faults
from cli_runs import events
from data_sets import write_folders
from paceline.comm.agreement import Agreement
from paceline.core.errors import PacelineError, RunError
from paceline.core.events import (
    NoteEvent,
    StepEvent,
)
from paceline.models import SmallResNet
from paceline.planner.start_up import PHASES
from paceline.precision import LossScale, PrecisionSettings
from paceline.report import RunFiles, bound_by
from paceline.train import (
    Checkpoint,
    TrainStep,
    checkpoint_weights,
    loop,
    run_training,
    step_records,
)
from paceline.train.run_folder import NAME as LOCK
from paceline.train.step import StepOutcome
from ranks import run_ranks
from small_runs import Silent, run_on_ranks, run_small, small_config
from train.runs import EVERY_STEP, AtStep, watched


def test_the_files_of_a_run(tmp_path: Path) -> None:
    outcome = run_small(tmp_path / "run", run__trackers=["tensorboard"])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    promised = {
        "top1", "top5", "images_per_s", "epochs", "steps", "world_size", "global_batch_size",
        "train_s", "steps_s", "versions", "hardware",
    }  # fmt: skip
    assert promised <= set(summary)
    assert summary["steps"] == 7  # 2 · 56 samples in batches of 16
    assert (summary["epochs"], summary["images"]) == (2, 112)
    assert summary["stopped_by"] == "finished"
    assert outcome.report == tmp_path / "run/report.html"
    assert "<svg" in outcome.report.read_text()
    steps = events(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == list(range(1, 8))
    assert summary["steps_s"] == pytest.approx(sum(event["step_s"] for event in steps))
    assert summary["steps_s"] < summary["train_s"], "which has evaluations and saves too"
    # Batches of 16 cross the end of epoch 1 (56 samples) in step 4.
    assert [event["step"] for event in events(tmp_path / "run", "eval")] == [4, 7]
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["best.pt", "step-00000004.pt", "step-00000007.pt"]
    assert any((tmp_path / "run/tensorboard").iterdir())
    assert not (tmp_path / "run" / LOCK).exists()
    exported = load_file(tmp_path / "run/weights.safetensors")
    weights = checkpoint_weights(Checkpoint.read(tmp_path / "run/checkpoints/step-00000007.pt"))
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(exported[name], value), name


def test_the_same_seed_gives_the_same_weights(finished: Path, tmp_path: Path) -> None:
    first = json.loads((finished / "summary.json").read_text())
    again = run_small(tmp_path / "b", data__workers=0).summary
    other = run_small(tmp_path / "c", run__seed=1).summary
    for name in ("weights_sha256", "top1"):
        assert first[name] == again[name]
    assert first["weights_sha256"] != other["weights_sha256"]


def test_two_ranks_are_bit_identical_and_agree_with_one_within_rounding(tmp_path: Path) -> None:
    values = {"run__batch_size": 8}
    runs = [run_on_ranks(2, tmp_path / name, values) for name in ("a", "b")]
    assert len({summary["weights_sha256"] for run in runs for summary in run}) == 1
    assert runs[0][0]["world_size"] == 2
    assert (tmp_path / "a/metrics.rank1.jsonl").exists()
    run_small(tmp_path / "one", **values)
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "a"))
    for name, value in one.items():
        # Running statistics are averaged over ranks, so only the weights must agree.
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_batch_larger_than_the_data_set_spans_epochs(tmp_path: Path) -> None:
    values = {"run__global_batch_size": 100, "run__batch_size": 10, "run__epochs": 4}
    summary = run_small(tmp_path / "run", **values).summary
    assert summary["steps"] == 3  # 224 samples: 100, 100, 24
    assert (summary["images"], summary["accumulation"]) == (224, 10)


def test_the_target_stops_the_run_and_its_time_is_kept(tmp_path: Path) -> None:
    summary = run_small(tmp_path / "run", run__target_top1=1.0, run__epochs=50).summary
    assert (summary["stopped_by"], summary["steps"]) == ("target", 4)
    assert 0 < summary["time_to_target_s"] <= summary["train_s"]


def test_evaluations_follow_their_interval(tmp_path: Path) -> None:
    run_small(tmp_path / "run", run__epochs=5, run__eval_interval_epochs=2)
    assert [int(e["epoch"]) for e in events(tmp_path / "run", "eval")] == [2, 4, 5]


def test_input_counters_are_those_of_all_ranks_and_splits(tmp_path: Path) -> None:
    values = {"data__source": "auto", "data__dir": str(write_folders(tmp_path / "data")),
              "data__cache": "memory"}  # fmt: skip
    counters = run_on_ranks(2, tmp_path / "run", values)[0]["input_counters"]
    # Two epochs of 40 training images, and two evaluations of 8.
    assert counters["cache_hits"] + counters["cache_misses"] == 2 * 40 + 2 * 8
    assert counters["read_retries"] == 0


# --- notes and observers -----------------------------------------------------------------------


class BusyLoad:
    """Replaces the host's own load readings."""

    latest = 0.7

    def read(self) -> float:
        return self.latest


def test_an_overloaded_host_is_noted_once_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "HostLoad", BusyLoad)
    run_small(tmp_path / "run", data__synthetic_samples=16)
    assert sum("overloaded" in e["text"] for e in events(tmp_path / "run", "note")) == 1
    assert {e["core_wait_share"] for e in events(tmp_path / "run", "step")} == {0.7}
    assert "overloaded host" in str(bound_by(RunFiles.read(tmp_path / "run")))


# --- the best checkpoint, and divergence -------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "train_loss", "val_loss", "best_step"),
    [
        ({7}, 1.0, 1.0, 7),  # a single overflow leaves good weights
        ({5, 7}, 1.0, 1.0, 7),
        ({6, 7}, 1.0, 1.0, 4),
        ({7}, float("inf"), 1.0, 4),
        ({7}, 1.0, float("nan"), 4),
    ],
)
def test_skips_in_a_row_and_a_non_finite_loss_disqualify_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    skipped: set[int], train_loss: float, val_loss: float, best_step: int,
) -> None:  # fmt: skip
    """Evaluations after steps 4 and 7; the second scores higher."""
    evaluate, collect, scores = loop.evaluate, TrainStep.collect, [(10.0, 1.0), (90.0, val_loss)]

    def scored(*arguments: Any, **options: Any) -> Any:
        top1, loss = scores.pop(0)
        found = evaluate(*arguments, **options)
        return replace(found, top1=top1, loss=loss)  # type: ignore[type-var]

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


FP16: dict[str, Any] = {"precision__amp_dtype": "fp16"}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`poison(n)`: the forward pass gives NaN from step n on, until the test ends."""
    monkeypatch.setattr(SmallResNet, "forward", SmallResNet.forward)
    return faults.poison


def diverge(output: Path, **values: Any) -> tuple[str, list[StepEvent]]:
    """The error of a run that must end, and its steps."""
    display = Silent()
    with pytest.raises(RunError) as caught:
        run_training(small_config(output, **values), lambda: display)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value), [e for e in display.events if isinstance(e, StepEvent)]


@pytest.mark.parametrize(
    ("first", "limit", "began", "skipped"),
    [(1, 100, 1, [True] * 10), (3, 2, 3, [False, False, True, True])],
)
def test_a_loss_that_stays_non_finite_ends_the_run(
    tmp_path: Path, poison: Callable[[int], None], monkeypatch: pytest.MonkeyPatch,
    first: int, limit: int, began: int, skipped: list[bool],
) -> None:  # fmt: skip
    poison(first)
    monkeypatch.setattr(step_records, "_SKIPPED_STEPS", limit)
    line, steps = diverge(tmp_path / "a", run__epochs=4)
    assert re.match(rf"diverged at step {began}: the loss was not finite in \d+ steps", line)
    assert "fc.bias (38 of 38 tensors)" in line
    assert "lower --lr (now 0.05 at its peak)" in line
    assert [step.skipped for step in steps] == skipped
    assert ("last good checkpoint" in line) == (tmp_path / "a/checkpoints").exists()


@pytest.fixture
def large_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales up to 2**40, at which gradients overflow."""
    monkeypatch.setattr(PrecisionSettings, "HIGHEST_SCALE", 2.0**40)


def test_an_overflow_at_the_lowest_loss_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_scales: None
) -> None:
    lowest = property(lambda scale: 2.0**26, lambda scale, value: None)
    monkeypatch.setattr(LossScale, "floor", lowest, raising=False)
    line, steps = diverge(tmp_path / "a", **FP16, precision__loss_scale_init=2.0**28)
    assert line.startswith("diverged at step 1: gradients overflow even at the lowest loss scale")
    assert [step.loss_scale for step in steps] == [2.0**28, 2.0**27, 2.0**26]


def test_gradients_that_stay_non_finite(
    tmp_path: Path, large_scales: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "_SKIPPED_STEPS", 3)
    values = {**FP16, "precision__loss_scale_init": 2.0**40}
    line, steps = diverge(tmp_path / "a", **values)
    assert line.startswith("diverged at step 1: gradients were not finite in 3 steps in a row")
    assert re.search(r"fc\.bias \(\d+ of 38 tensors\)", line)
    assert [step.skipped for step in steps] == [True] * 3


def test_skipped_steps_count_only_in_a_row(
    tmp_path: Path, large_scales: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that grows every step overflows now and then; training continues."""
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", 1)
    monkeypatch.setattr(step_records, "_SKIPPED_STEPS", 2)
    outcome = run_small(
        tmp_path / "a", **FP16,
        precision__loss_scale_init=2.0**17, run__epochs=4,
    )  # fmt: skip
    assert outcome.summary["skipped_steps"] >= 3
    assert outcome.result.stopped_by == "finished"


def test_the_last_good_checkpoint_is_kept_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_small(tmp_path / "whole", run__epochs=4)
    with monkeypatch.context() as patched:
        patched.setattr(SmallResNet, "forward", SmallResNet.forward)
        patched.setattr(step_records, "_SKIPPED_STEPS", 4)
        faults.poison(4)
        # Every step saves and one is kept: saves of skipped steps must not replace it.
        keep = EVERY_STEP | {"checkpoint__keep": 1}
        diverge(tmp_path / "a", run__epochs=4, **keep)
    saved = sorted((tmp_path / "a/checkpoints").glob("step-*.pt"))
    assert [path.stem for path in saved] == ["step-00000003"]
    assert Checkpoint.read(saved[0]).progress["skipped_in_a_row"] == 0
    assert not (tmp_path / "a/summary.json").exists()
    resumed = run_small(tmp_path / "a", run__resume=str(saved[0]), run__epochs=4)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_postponed_save_comes_with_the_next_good_step(tmp_path: Path) -> None:
    """The loss scale overflows at first, so the saves of the first steps wait."""
    values = {**FP16, **EVERY_STEP, "precision__loss_scale_init": 2.0**22}
    _, events = watched(tmp_path / "a", **values)
    skipped = [e.step for e in events if isinstance(e, StepEvent) and e.skipped]
    first_good = next(step for step in range(1, 8) if step not in skipped)
    assert first_good > 1
    assert min((tmp_path / "a/checkpoints").glob("step-*")).stem == f"step-{first_good:08d}"


def _phases(rank: int, output: str) -> list[str]:
    names: list[str] = []
    agree = Agreement.agree

    def noted(self: Agreement, phase: str, *details: Any, **given: Any) -> None:
        names.append(phase)
        agree(self, phase, *details, **given)

    Agreement.agree = noted  # type: ignore[method-assign]
    try:
        run_small(output, run__batch_size=8, comm__fusion_mib=0.25)
    finally:
        Agreement.agree = agree  # type: ignore[method-assign]
    return names


def test_a_run_has_as_many_phases_as_the_planner_counts(tmp_path: Path) -> None:
    """Each of them costs every rank a wait for the slowest; see `Group.phase`."""
    first, second = run_ranks(2, _phases, str(tmp_path / "run"))
    assert first == second
    assert len(first) == PHASES, first


def test_a_plan_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "run/plan.toml").mkdir(parents=True)
    with pytest.raises(PacelineError, match=r"cannot write the run's records.*--output") as caught:
        run_small(tmp_path / "run")
    assert caught.value.exit_code == 1


def _garble(log: Path) -> None:
    log.write_text("not a record\n")


def _replace_by_folder(log: Path) -> None:
    log.unlink()
    log.mkdir()


@pytest.mark.parametrize("damage", [Path.unlink, _garble, _replace_by_folder])
def test_a_log_blocks_neither_training_nor_resuming(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    output = tmp_path / "run"
    display = AtStep(3, partial(damage, output / "metrics.jsonl"))
    outcome, events = watched(output, display=display)
    assert outcome.result.stopped_by == "finished"
    assert json.loads((output / "summary.json").read_text())["steps"] == 7
    notes = [event.text for event in events if isinstance(event, NoteEvent)]
    assert any("metrics.jsonl" in note for note in notes) == (damage is not Path.unlink)
    assert (outcome.report is None) == (damage is not Path.unlink)
    again = small_config(output, run__resume="auto")
    assert run_training(again, Silent).already_finished
    (output / "summary.json").unlink()
    resumed = run_training(again, Silent)
    assert resumed.summary["weights_sha256"] == outcome.summary["weights_sha256"]
