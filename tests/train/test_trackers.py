"""Trackers: what they receive, and that none of their failures reaches the training."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli_runs import events
from paceline.core.errors import ConfigError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    MetricEvent,
    NoteEvent,
    RanksEvent,
    StepEvent,
)
from paceline.trackers import register, thread
from paceline.trackers.clients import CsvTracker, TensorBoardTracker, WandbTracker
from paceline.trackers.thread import TrackerThread, scalars
from small_runs import run_small, small_config
from train.runs import stop_after

STEP = StepEvent(
    3, 0.5, 1.25, 0.1, 900.0, 0.1, 0.0, exposed_comm_s=0.01, input_stall_s=0.02,
    input_stall_causes={"decode": 0.02}, grad_norm=float("nan"),
)  # fmt: skip


class Kept:
    """A tracker that keeps what it gets, and fails where it is asked to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._fails_at = fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the server\nis offline")
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_every_number_of_an_event_has_a_name() -> None:
    found = scalars(STEP)
    assert found["train/loss"] == 1.25
    assert found["train/input_stall_causes/decode"] == 0.02
    assert "train/grad_norm" not in found
    assert "train/core_wait_share" not in found
    assert "train/step" not in found
    spread = {"min": 1.0, "median": 2.0, "max": 3.0, "rank": 5}
    ranks = scalars(RanksEvent(3, 8, spread, spread, spread))
    assert (ranks["ranks/step_s/max"], ranks["ranks/ranks"]) == (3.0, 8.0)
    assert scalars(MetricEvent(3, {"mine": 7.0})) == {"metric/mine": 7.0}
    assert scalars(CheckpointEvent(3, "p", 2.0, stall_s=0.1))["checkpoint/stall_s"] == 0.1
    assert scalars(EvalEvent(3, 0.5, 87.5, 99.0, 0.5, 2000, 0.7))["val/top1"] == 87.5
    assert scalars(NoteEvent("text")) == {}


def test_fields_of_a_strategy_stand_among_the_others(tmp_path: Path) -> None:
    fields = {
        "staleness": {"0": 3, "1": 2},
        "predicted_s": 2.5,
        "place": "here",
        "names": {"a": "b"},
    }
    step = replace(STEP, fields=fields, core_wait_share=0.0, grad_norm=1.0)
    found = scalars(step)
    own = {"train/staleness/0": 3.0, "train/staleness/1": 2.0, "train/predicted_s": 2.5}
    assert found == scalars(replace(step, fields={})) | own
    evaluation = EvalEvent(3, 0.5, 87.5, 99.0, 0.5, 2000, 0.7, "late", {"predicted_s": 4.0})
    assert scalars(evaluation)["val/predicted_s"] == 4.0
    tracker = CsvTracker(tmp_path, 0)
    tracker.log(3, found | scalars(evaluation))
    tracker.close()
    (row,) = rows(tmp_path / "metrics.csv")
    maybe = {"train/grad_signal", "train/grad_variance", "train/noise_scale", "train/batch_size"}
    empty = {
        name for name, value in row.items() if not value and "/input_stall_causes/" not in name
    }
    assert empty == maybe | {"train/momentum"}
    more = {row["name"] for row in rows(tmp_path / "metrics-more.csv")}
    assert more == {*own, "val/predicted_s"}


def test_events_reach_the_tracker_in_order() -> None:
    kept, notes = Kept(), list[str]()
    passing = TrackerThread("kept", lambda: kept, notes.append)
    for event in (STEP, CorruptEvent(3, "x", "bad"), CorruptEvent(4, "y", "bad"), NoteEvent("n")):
        passing.on_event(event)
    passing.close()
    assert [step for step, _ in kept.logged] == [3, 3, 4]
    assert kept.logged[-1][1] == {"train/corrupt_samples": 2.0}
    assert kept.closed
    assert notes == []


def fails_at_once() -> Kept:
    raise SystemExit("no licence")


@pytest.mark.parametrize("make", [fails_at_once, lambda: Kept(fails_at=3)])
def test_a_tracker_that_raises_is_one_line(make: Any) -> None:
    notes: list[str] = []
    passing = TrackerThread("kept", make, notes.append)
    for _ in range(3):
        passing.on_event(STEP)
    passing.close()
    passing.close()
    assert len(notes) == 1
    assert "tracker kept failed" in notes[0]
    assert "\n" not in notes[0]


def test_a_tracker_that_hangs_loses_metrics_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "_QUEUE", 2)
    monkeypatch.setattr(thread, "_CLOSE_S", 0.05)
    release, notes = threading.Event(), list[str]()

    class Hangs(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(60)

    passing = TrackerThread("hangs", Hangs, notes.append)
    for _ in range(10):
        passing.on_event(STEP)
    passing.close()
    release.set()
    assert len(notes) == 1
    assert "loses metrics" in notes[0] or "did not finish" in notes[0]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_of_a_run_and_of_the_run_that_resumes_it(tmp_path: Path) -> None:
    values: dict[str, Any] = {"run__trackers": ["csv"], "checkpoint__interval_steps": 3}
    stop_after(5, tmp_path / "run", **values)
    # As if it had been killed: a row that the resumed run repeats, and one that was cut.
    with (tmp_path / "run/metrics.csv").open("a") as file:
        file.write("6,1.0\r\n7,")
    run_small(tmp_path / "run", **values, run__resume="auto")
    found = rows(tmp_path / "run/metrics.csv")
    losses = {int(row["step"]): float(row["train/loss"]) for row in found if row["train/loss"]}
    assert losses == {e["step"]: e["loss"] for e in events(tmp_path / "run", "step")}
    assert [row["val/top1"] for row in found if row["val/top1"]] == [
        str(e["top1"]) for e in events(tmp_path / "run", "eval")
    ]
    names = {row["name"] for row in rows(tmp_path / "run/metrics-more.csv")}
    assert "checkpoint/stall_s" in names


def test_a_failing_tracker_that_a_program_registers_does_not_change_a_run(tmp_path: Path) -> None:
    register("kept", lambda *_: Kept(fails_at=2))
    outcome = run_small(tmp_path / "run", run__trackers=["kept"])
    assert outcome.summary["steps"] == 7
    notes = [e["text"] for e in events(tmp_path / "run", "note")]
    assert len([note for note in notes if "tracker kept failed" in note]) == 1


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="run.trackers"):
        run_small(tmp_path / "run", run__trackers=["wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[mlflow\]'"):
        run_small(tmp_path / "run", run__trackers=["mlflow"])
    assert json.dumps(small_config(tmp_path, run__trackers=["csv"]).to_tables()["run"]["trackers"])


def test_tensorboard_hides_the_steps_after_the_checkpoint_and_keeps_its_own(tmp_path: Path) -> None:
    for first_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        tracker = TensorBoardTracker(tmp_path, first_step)
        for step in steps:
            tracker.log(step, {"train/loss": float(first_step)})
        tracker.close()
        # Event files are read in the order of their names, which have seconds.
        (file,) = (tmp_path / "tensorboard").glob("*.[0-9]*.[0-9]*")
        file.rename(file.with_name(f"events.out.tfevents.{first_step}"))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = {e.step: e.value for e in read.Scalars("train/loss")}
    assert found == {1: 0.0, 2: 0.0, 3: 2.0, 4: 2.0, 5: 2.0}
    assert [e.step for e in read.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_wandb_gets_the_step_as_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own counter drops what belongs to an earlier step."""
    logged: list[dict[str, float]] = []
    axes: dict[str, str | None] = {}
    run = SimpleNamespace(
        log=lambda values: logged.append(values), finish=lambda: None,
        define_metric=lambda name, step_metric=None: axes.__setitem__(name, step_metric),
    )  # fmt: skip
    fake = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, {})
    tracker.log(5, {"train/loss": 1.0})
    tracker.log(4, {"checkpoint/save_s": 2.0})
    assert logged == [{"train/loss": 1.0, "step": 5}, {"checkpoint/save_s": 2.0, "step": 4}]
    assert axes["*"] == "step"
