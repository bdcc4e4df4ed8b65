"""The report of a run: outcome, verdict, rows, tables, figures of extensions, the page and its file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core import files
from paceline.core.errors import DataError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    MetricEvent,
    NoteEvent,
    StepEvent,
    StopEvent,
)
from paceline.report import (
    Outcome,
    RunFiles,
    Table,
    render_run,
    summary_rows,
    tables,
    verdict,
    write_page,
    write_report,
)
from paceline.report.curves import run_charts
from paceline.report.outcome import ExtraFigure
from report.conftest import MakeRun
from report.html_reader import run_page
from report.made_up_runs import SUMMARY, evaluation, start, step


def outcome_of(folder: Path) -> Outcome:
    return Outcome.of(RunFiles.read(folder))


def rows_of(folder: Path) -> dict[str, str]:
    return dict(summary_rows(RunFiles.read(folder)))


def test_figures_come_from_the_summary(finished_run: Path) -> None:
    outcome = outcome_of(finished_run)
    assert (outcome.name, outcome.state, outcome.stopped_by) == (
        "quickstart", "finished", "finished"
    )  # fmt: skip
    assert (outcome.top1, outcome.top5, outcome.images_per_s) == (90.31, 99.72, 1430.4)
    assert (outcome.train_s, outcome.epochs, outcome.world_size) == (101.2, 8.0, 1)
    assert (outcome.steps, outcome.total_steps, outcome.global_batch_size) == (800, 800, 120)
    assert outcome.best_top1 == pytest.approx(90.5 - 30 * math.exp(-800 / 180))
    rows = rows_of(finished_run)
    assert list(rows)[:10] == [
        "run", "top-1", "top-5", "images/s", "training time", "epochs", "steps", "global batch",
        "ranks", "stopped by",
    ]  # fmt: skip
    assert (rows["top-1"], rows["training time"]) == ("90.31 %", "101 s")


def test_figures_of_an_unfinished_run_come_from_its_records(make_run: MakeRun) -> None:
    events = [
        start(), step(1, images_per_s=100.0), step(2, math.nan, images_per_s=300.0, skipped=True),
        evaluation(2, 60.0), step(3, images_per_s=200.0), evaluation(3, 50.0, top5=90.0),
    ]  # fmt: skip
    corrupt = [start(), *(CorruptEvent(2, name, "bad") for name in "aba")]
    outcome = outcome_of(make_run(events, ranks={1: corrupt}))
    assert (outcome.state, outcome.stopped_by) == ("unfinished", None)
    assert (outcome.top1, outcome.top5, outcome.best_top1) == (50.0, 90.0, 60.0)
    assert outcome.images_per_s == 200.0
    assert (outcome.steps, outcome.total_steps, outcome.epochs) == (3, 800, 0.03)
    assert (outcome.skipped_steps, outcome.steps_without_loss) == (1, 1)
    assert outcome.corrupt_samples == 2
    assert outcome.train_s == pytest.approx(0.5)  # six records, a tenth of a second apart


def test_figures_of_an_empty_run_are_unknown(make_run: MakeRun) -> None:
    folder = make_run([], config=None)
    outcome = outcome_of(folder)
    assert (outcome.name, outcome.state, outcome.steps) == ("run", "unfinished", 0)
    assert outcome.top1 is outcome.images_per_s is outcome.train_s is outcome.world_size is None
    assert rows_of(folder)["top-1"] == "–"


@pytest.mark.parametrize(
    ("reason", "state"),
    [("finished", "finished"), ("target", "finished"), ("signal", "stopped"), ("error", "stopped")],
)
def test_the_state_follows_from_the_last_stop(make_run: MakeRun, reason: str, state: str) -> None:
    events = [start(), step(1), StopEvent(1, reason)]
    outcome = outcome_of(make_run(events))
    assert (outcome.state, outcome.stopped_by) == (state, reason)
    resumed = outcome_of(make_run([*events, start(1), step(2)], name="resumed"))
    assert (resumed.state, resumed.stopped_by, resumed.resumes) == ("unfinished", None, 1)


def test_a_run_of_several_ranks_has_a_page_before_its_first_step(make_run: MakeRun) -> None:
    folder = make_run([start(world_size=2)])
    assert "no step recorded yet" in render_run(RunFiles.read(folder))


def test_incidents_are_rows_and_tables(make_run: MakeRun) -> None:
    on_0 = [
        start(), step(1), CorruptEvent(9, "b.png", "truncated"), CorruptEvent(9, "b.png", "again"),
        evaluation(1, 95.0), start(1, resumed_from="checkpoints/step-1.pt", world_size=2),
        step(2, math.nan, skipped=True), NoteEvent("a"), NoteEvent("b"), NoteEvent("a"),
        CorruptEvent(9, "b.png", "truncated"),
    ]  # fmt: skip
    on_1 = [start(), CorruptEvent(3, "a.png", "no image"), CorruptEvent(5, "b.png", "cut short"),
            *(step(n, step_s=0.2, data_s=0.1) for n in range(1, 4))]  # fmt: skip
    summary = {
        **SUMMARY, "steps": 2, "time_to_target_s": 88.0, "stopped_by": "target",
        "corrupt_samples": 8, "input_counters": {"read_retries": 1200, "cache_damaged": 2},
    }  # fmt: skip
    folder = make_run(on_0, summary=summary, ranks={1: on_1})
    rows = rows_of(folder)
    assert (rows["best top-1"], rows["time to target"], rows["steps"]) == (
        "95.00 %", "88 s", "2 of 800"
    )  # fmt: skip
    assert (rows["corrupt training images"], rows["repeated reads"]) == ("8", "1,200")
    assert (rows["damaged cache entries"], rows["skipped steps"], rows["resumes"]) == (
        "2",
        "1",
        "1",
    )
    page = run_page(folder)
    assert page.tables["Corrupt samples"][1:] == [
        ("a.png", "no image", "3", "1"), ("b.png", "cut short", "5", "1")
    ]  # fmt: skip
    assert page.tables["Skipped steps"][1:] == [("2", "0.02", "–")]
    assert page.tables["Resumes"][1:] == [
        ("2025-11-15 07:00 UTC", "1", "checkpoints/step-1.pt", "2 ranks")
    ]
    assert page.tables["Ranks"][1:] == [("0", "2", "84 ms", "2 ms"), ("1", "3", "200 ms", "100 ms")]
    assert page.text.count("\na\n") == 1, "each note once"


def test_evaluations_show_the_training_since_the_previous_one(make_run: MakeRun) -> None:
    events = [start(), evaluation(0, 10.0)]
    events += [step(n, float(n), images_per_s=1000.0 + n) for n in range(1, 4)]
    events += [evaluation(3, 70.0)]
    events += [step(n, float(n), images_per_s=1000.0 + n) for n in range(4, 9)]
    events += [evaluation(8, 75.0, loss=math.nan)]
    head, *rows = run_page(make_run(events)).tables["Evaluations"]
    latest, first, untrained = (dict(zip(head, row, strict=True)) for row in rows)
    assert (latest["step"], latest["top-1"], latest["validation loss"]) == ("8", "75.00 %", "–")
    assert (latest["training loss"], latest["images/s"]) == ("6.0000", "1,006")
    assert latest["learning rate"] == "0.03199"
    assert (first["step"], first["training loss"], first["images/s"]) == ("3", "2.0000", "1,002")
    assert (untrained["step"], untrained["training loss"], untrained["images/s"]) == ("0", "–", "–")


def test_checkpoints_the_latest_first_and_not_all(make_run: MakeRun) -> None:
    events = [start(), *(CheckpointEvent(n, f"c{n}.pt", 0.5, best=n == 29) for n in range(1, 31))]
    page = run_page(make_run(events))
    assert page.tables["Saves"][1:3] == [
        ("c30.pt", "30", "500 ms", "–", ""), ("c29.pt", "29", "500 ms", "–", "best so far")
    ]  # fmt: skip
    assert len(page.tables["Saves"]) == 13
    assert "18 more not shown" in page.text
    table = Table.of("Steps", ("step",), [(str(n),) for n in range(1434)], set())
    assert (len(table.rows), table.note) == (200, "1,234 more not shown")


def test_a_finished_page_has_charts_configuration_and_environment(finished_run: Path) -> None:
    page = run_page(finished_run)
    assert "quickstart: 90.3\u00a0% top-1 in 101\u00a0s" in page.text
    assert page.tags.count("svg") == 5  # four charts, and the bar of the efficiency
    assert page.tables["optim"] == [
        ("lr", "0.4"), ("momentum", "0.9"), ("nesterov", "true"), ("milestones", "3, 6")
    ]  # fmt: skip
    assert ("torch", "2.13.0+cpu") in page.tables["Versions"]
    assert page.tables["Hardware"] == [("cpu", "2 cores"), ("gpus", "(none)")]
    assert page.tables["Chosen automatically"] == [("comm.backend", "none")]
    assert {"Incidents", "Ranks", "Skipped steps"}.isdisjoint(page.tables)
    assert SUMMARY["weights_sha256"] in page.text


HOSTILE = "<script>alert(1)</script>\"'&\x1b\x00\ud800</title></style>"


def test_hostile_names_stay_text(make_run: MakeRun) -> None:
    events = [
        start(resumed_from=HOSTILE, chosen={HOSTILE: HOSTILE}), step(1), evaluation(1),
        NoteEvent(HOSTILE), CorruptEvent(1, HOSTILE, HOSTILE), CheckpointEvent(1, HOSTILE, 0.1),
        StopEvent(1, HOSTILE),
    ]  # fmt: skip
    summary = {
        **SUMMARY, "recipe": HOSTILE, "model": HOSTILE, "stopped_by": HOSTILE,
        "weights_sha256": HOSTILE, "versions": {HOSTILE: HOSTILE}, "hardware": {HOSTILE: [HOSTILE]},
    }  # fmt: skip
    plain = HOSTILE.replace("\ud800", "")  # TOML cannot hold half a character
    config = {plain: {plain: [plain]}, "other": plain}
    folder = make_run(events, summary=summary, config=config, name="<b>&run")
    page = run_page(folder)
    assert "b" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert "\x1b" not in page.text
    run = RunFiles.read(folder)
    for text in (verdict(run), *(cell for row in summary_rows(run) for cell in row)):
        assert text.isprintable()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_report_is_written_beside_the_records_or_elsewhere(
    finished_run: Path, tmp_path: Path
) -> None:
    (finished_run / "report.html").write_text("old", "utf-8")
    path = write_report(finished_run)
    assert path == finished_run / "report.html"
    assert path.read_text("utf-8") == render_run(RunFiles.read(finished_run))
    assert names(finished_run) == ["config.toml", "metrics.jsonl", "report.html", "summary.json"]
    assert path.stat().st_mode == (finished_run / "config.toml").stat().st_mode
    out = tmp_path / "new" / "folder" / "page.html"
    assert write_report(finished_run, out) == out
    assert write_report(finished_run, tmp_path) == tmp_path / "report.html"
    assert write_page("<p>ä</p>", tmp_path, "any.html").read_bytes() == "<p>ä</p>".encode()


@pytest.mark.parametrize(
    "name", ["summary.json", "config.toml", "metrics.jsonl", "weights.safetensors", "notes.txt"]
)
def test_files_that_are_no_pages_are_not_replaced(finished_run: Path, name: str) -> None:
    """Includes files that the run writes later. An empty file and an older page are replaced."""
    (finished_run / "notes.txt").write_text("mine", "utf-8")
    before = {file.name: file.read_bytes() for file in finished_run.iterdir()}
    with pytest.raises(DataError):
        write_report(finished_run, finished_run / name)
    assert {file.name: file.read_bytes() for file in finished_run.iterdir()} == before
    (finished_run.parent / "page").touch()
    for _ in range(2):
        assert write_report(finished_run, finished_run.parent / "page").stat().st_size > 1000


def test_a_failed_write_leaves_the_old_report(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished_run / "report.html").write_text("old", "utf-8")
    with pytest.raises(DataError):
        write_report(finished_run, finished_run / "config.toml" / "page.html")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        write_report(finished_run)
    assert (finished_run / "report.html").read_text("utf-8") == "old"
    assert names(finished_run) == ["config.toml", "metrics.jsonl", "report.html", "summary.json"]


def test_what_a_strategy_counts_is_a_table(make_run: MakeRun) -> None:
    declared = replace(start(), counts={"staleness": ["Staleness", "updates", "pushes"]})
    steps = [
        StepEvent(step=n, epoch=n / 4, loss=1.0, lr=0.1, images_per_s=9.0, step_s=1.0, data_s=0.0,
                  fields={"staleness": {"0": 1, str(n): 3}})
        for n in (1, 2)
    ]  # fmt: skip
    run = RunFiles.read(make_run([declared, *steps]))
    (table,) = tables.count_tables(run)
    assert table.columns == ("updates", "pushes", "share")
    assert table.rows == (("0", "2", "25.0 %"), ("1", "3", "37.5 %"), ("2", "3", "37.5 %"))
    assert "Staleness" in render_run(run)
    plain = RunFiles.read(make_run([start(), *steps], name="plain"))
    assert tables.count_tables(plain) == []
    odd = [declared, replace(steps[0], fields={"staleness": {"x": 1, "2": "y"}})]
    (empty,) = tables.count_tables(RunFiles.read(make_run(odd, name="odd")))
    assert empty.rows == ()


def test_metrics_of_callbacks_are_tables_and_curves(make_run: MakeRun) -> None:
    events = [start(), *(step(n) for n in range(1, 9))]
    events += [MetricEvent(n, {"gap": 1.0 / n, "<b>": math.nan}) for n in range(1, 9)]
    other = [start(), MetricEvent(3, {"gap": 7.0, "<b>": 2.0})]
    folder = make_run(events, ranks={1: other})
    page = run_page(folder)
    assert page.tables["Logged metrics"] == [
        ("metric", "rank", "latest", "lowest", "highest", "at step", "entries"),
        ("gap", "0", "0.125", "0.125", "1", "8", "8"),
        ("gap", "1", "7", "7", "7", "3", "1"),
        ("<b>", "1", "2", "2", "2", "3", "1"),
    ]
    assert "rank 0" in page.text
    assert any("gap by step: rank 0 from 1 to 0.125" in str(text) for _, text in page.attributes)


SHOWN = [
    {"part": "fan", "name": "air_s", "label": "air time", "unit": "duration", "column": "air",
     "axis": "minutes of air"},
    {"part": "fan", "name": "images_per_s", "label": "air's images/s", "unit": "rate"},
]  # fmt: skip
EVENTS = [start(shown=SHOWN), evaluation(100, fields={"air_s": 60.0}),
          evaluation(200, fields={"air_s": 120.0})]  # fmt: skip


def figures(run: RunFiles) -> dict[str, float | None]:
    return {own.name: own.value for own in ExtraFigure.of(run)}


def test_before_the_end_they_are_those_of_the_latest_evaluation(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run(EVENTS))
    assert figures(run) == {"air_s": 120.0, "images_per_s": None}
    assert dict(summary_rows(run))["air time"] == "2 min 0 s"
    assert "Accuracy over the air time (%)" in {chart.title for chart in run_charts(run)}


def test_at_the_end_they_are_those_of_the_summary(make_run: MakeRun) -> None:
    """A field of the same name elsewhere is another one."""
    ended = {**SUMMARY, "fan": {"air_s": 180.0, "images_per_s": 7.0}}
    assert figures(RunFiles.read(make_run(EVENTS, summary=ended))) == {
        "air_s": 180.0, "images_per_s": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize("shown", [7, [7], [{"name": 7, "part": []}], {"name": "x"}])
def test_foreign_records_declare_nothing_that_breaks_a_page(make_run: MakeRun, shown: Any) -> None:
    run = RunFiles.read(make_run([start(shown=shown)], summary=SUMMARY))
    assert set(figures(run).values()) <= {None}
    assert summary_rows(run)
