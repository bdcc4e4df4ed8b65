"""Callbacks: events on every rank, agreed stops, recorded metrics, and failures that lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from api.conftest import trainer
from cli_runs import events
from ranks import run_ranks


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, run: pl.RunControl, event: pl.StartEvent) -> None:
        self.seen.append("start")

    def on_step(self, run: pl.RunControl, event: pl.StepEvent) -> None:
        self.seen.append("step")
        run.log(double=2 * event.loss)

    def on_evaluation(self, run: pl.RunControl, event: pl.EvalEvent) -> None:
        self.seen.append("evaluation")

    def on_checkpoint(self, run: pl.RunControl, event: pl.CheckpointEvent) -> None:
        self.seen.append("checkpoint")

    def on_stop(self, run: pl.RunControl, event: pl.StopEvent) -> None:
        self.seen.append(event.reason)


def test_every_event_in_order_and_metrics_recorded(tmp_path: Path) -> None:
    recorder = Recorder()
    result = trainer(tmp_path / "run", epochs=1, callbacks=[recorder]).fit()
    assert recorder.seen[0] == "start"
    assert recorder.seen[-1] == "finished"
    assert {"step", "evaluation", "checkpoint"} <= set(recorder.seen)
    losses = [record["loss"] for record in events(result.folder, "step")]
    logged = [record["values"]["double"] for record in events(result.folder, "metric")]
    assert logged == [2 * loss for loss in losses]
    assert "double by " in (result.folder / "report.html").read_text()


def test_early_stopping_and_continuing(tmp_path: Path) -> None:
    stop = pl.EarlyStopping("loss", patience=1, min_delta=1e9)
    result = trainer(tmp_path / "run", epochs=4, callbacks=[stop]).fit()
    assert result.stopped_by == "callback"
    assert 0 < result.summary["epochs"] < 4
    result = trainer(tmp_path / "run", epochs=4, resume="auto").fit()
    assert (result.stopped_by, result.summary["epochs"]) == ("finished", 4)


class StopsOnRank1(pl.Callback):
    def on_step(self, run: pl.RunControl, event: pl.StepEvent) -> None:
        if run.rank == 1 and event.step == 2:
            run.stop("enough")


class FailsOnRank1(pl.Callback):
    def on_step(self, run: pl.RunControl, event: pl.StepEvent) -> None:
        if run.rank == 1 and event.step == 2:
            raise ValueError("no such metric")


def _run(rank: int, output: str, kind: type[pl.Callback]) -> tuple[str, int]:
    made = trainer(Path(output), callbacks=[kind()])
    try:
        result = made.fit()
    except pl.PacelineError as error:
        return str(error), -1
    return result.stopped_by, int(result.summary.get("steps", 0))


def test_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, _run, str(tmp_path / "run"), StopsOnRank1)
    assert (first, second[0]) == (("callback", 3), "callback")


def test_a_failure_is_one_line_on_all_ranks_and_loses_no_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, _run, str(tmp_path / "run"), FailsOnRank1)
    assert (
        "rank 1: the callback FailsOnRank1.on_step failed: ValueError: no such metric" in second[0]
    )
    assert "FailsOnRank1.on_step failed" in first[0]
    assert (tmp_path / "run" / "checkpoints" / "step-00000003.pt").exists()


@pytest.mark.parametrize(("metric", "patience"), [("accuracy", 3), ("top1", 0)])
def test_bad_arguments_of_early_stopping(metric: str, patience: int) -> None:
    with pytest.raises(pl.ConfigError):
        pl.EarlyStopping(metric, patience)


def test_early_stopping_remembers_across_a_resume_and_not_across_runs(tmp_path: Path) -> None:
    def stop() -> pl.EarlyStopping:
        return pl.EarlyStopping("loss", patience=2, min_delta=1e9)

    first = stop()
    trainer(tmp_path / "a", epochs=2, callbacks=[first]).fit()  # best, then waited once
    assert first.waited == 1
    result = trainer(tmp_path / "a", epochs=5, resume="auto", callbacks=[stop()]).fit()
    assert (result.stopped_by, result.summary["steps"]) == ("callback", 12)
    trainer(tmp_path / "b", epochs=2, callbacks=[first]).fit()
    assert first.waited == 1, "another run starts afresh"


class FailsAtTheEnd(pl.Callback):
    def on_stop(self, run: pl.RunControl, event: pl.StopEvent) -> None:
        raise ValueError("too late")


def test_a_failure_at_the_end_costs_no_result(tmp_path: Path) -> None:
    with pytest.raises(pl.PacelineError, match="FailsAtTheEnd.on_stop failed"):
        trainer(tmp_path / "run", epochs=1, callbacks=[FailsAtTheEnd()]).fit()
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "weights.safetensors").exists()
