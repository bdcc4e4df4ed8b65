"""What a run came to: from its summary, else from its records."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.events import CorruptEvent, StopEvent
from paceline.report.outcome import Outcome
from paceline.report.run_files import RunFiles
from report.conftest import MakeRun
from report.made_up_runs import SUMMARY, evaluation, start, step


def outcome_of(folder: Path) -> Outcome:
    return Outcome.of(RunFiles.read(folder))


def test_a_finished_run_speaks_through_its_summary(finished_run: Path) -> None:
    outcome = outcome_of(finished_run)
    assert replace(outcome, best_top1=None) == Outcome(
        name="quickstart",
        state="finished",
        stopped_by="finished",
        top1=90.31,
        top5=99.72,
        best_top1=None,
        images_per_s=1430.4,
        train_s=101.2,
        time_to_target_s=None,
        epochs=8.0,
        steps=800,
        total_steps=800,
        world_size=1,
        global_batch_size=120,
        corrupt_samples=0,
        corrupt_val_samples=0,
        skipped_steps=0,
        steps_without_loss=0,
        resumes=0,
        read_retries=0,
        damaged_cache_entries=0,
    )
    assert outcome.best_top1 == pytest.approx(90.5 - 30 * math.exp(-800 / 180))


def test_an_unfinished_run_speaks_through_its_records(make_run: MakeRun) -> None:
    events = [
        start(),
        step(1, images_per_s=100.0),
        step(2, math.nan, images_per_s=300.0, skipped=True),
        evaluation(2, 60.0),
        step(3, images_per_s=200.0),
        evaluation(3, 50.0, top5=90.0),
    ]
    corrupt = [start(), *(CorruptEvent(2, name, "bad") for name in "aba")]
    outcome = outcome_of(make_run(events, ranks={1: corrupt}))
    assert outcome.state == "unfinished"
    assert outcome.stopped_by is None
    assert (outcome.top1, outcome.top5, outcome.best_top1) == (50.0, 90.0, 60.0)
    assert outcome.images_per_s == 200.0
    assert (outcome.steps, outcome.total_steps, outcome.epochs) == (3, 800, 0.03)
    assert (outcome.skipped_steps, outcome.steps_without_loss) == (1, 1)
    assert outcome.corrupt_samples == 2
    assert outcome.train_s == pytest.approx(0.5)  # six records, a tenth of a second apart


def test_an_empty_run_knows_nothing(make_run: MakeRun) -> None:
    outcome = outcome_of(make_run([], config=None))
    assert (outcome.name, outcome.state, outcome.steps) == ("run", "unfinished", 0)
    assert outcome.top1 is outcome.images_per_s is outcome.train_s is outcome.world_size is None


def test_pauses_between_processes_do_not_count_as_training(make_run: MakeRun) -> None:
    events = [start(), step(1), step(2), start(2), step(3)]  # 0.2 s, then a pause, then 0.1 s
    assert outcome_of(make_run(events)).train_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("reason", "state"),
    [("finished", "finished"), ("target", "finished"), ("signal", "stopped"), ("error", "stopped")],
)
def test_state_from_the_stop_alone(make_run: MakeRun, reason: str, state: str) -> None:
    outcome = outcome_of(make_run([start(), step(1), StopEvent(1, reason)]))
    assert (outcome.state, outcome.stopped_by) == (state, reason)


def test_a_stop_before_the_last_start_is_history(make_run: MakeRun) -> None:
    outcome = outcome_of(make_run([start(), step(1), StopEvent(1, "signal"), start(1), step(2)]))
    assert (outcome.state, outcome.stopped_by, outcome.resumes) == ("unfinished", None, 1)


@pytest.mark.parametrize(
    ("summary", "config", "name"),
    [
        ({**SUMMARY, "recipe": "my/recipes/tiny.toml"}, {}, "tiny"),
        (None, {"run": {"name": "cifar10-resnet18"}}, "cifar10-resnet18"),
        (None, {"run": 3}, "run"),
        ({**SUMMARY, "recipe": None}, {}, "run"),
    ],
)
def test_the_runs_name(
    make_run: MakeRun, summary: dict[str, object] | None, config: dict[str, object], name: str
) -> None:
    assert outcome_of(make_run([start()], summary=summary, config=config)).name == name
