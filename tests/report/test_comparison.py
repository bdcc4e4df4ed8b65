"""Comparisons: which runs make a row, its name and difference, and the table, JSON, Markdown and page."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.events import StepEvent
from paceline.report.compare_page import (
    compare_caption,
    compare_charts,
    compare_json,
    compare_markdown,
    compare_table,
    render_comparison,
    series_look,
)
from paceline.report.compare_runs import ComparedRun, CompareError, read_runs
from paceline.report.comparison import (
    Comparison,
    Difference,
    Spread,
    differing_settings,
    naming_settings,
)
from refusals import refused
from report.html_reader import read_page
from report.made_up_runs import events_of, start, step, write_ablation, write_run


@pytest.fixture
def ablation(tmp_path: Path) -> Comparison:
    return Comparison.of(read_runs(write_ablation(tmp_path)))


def compare(home: Path, *runs: dict[str, Any]) -> Comparison:
    """A comparison of runs with these settings, in folders 0, 1, …"""
    for number, run in enumerate(runs):
        write_run(home / str(number), **{"top1": 90.0, **run})
    return Comparison.of(read_runs([home]))


SGD, LARS = "opt=sgd batch=250 lr_base=0.2", "opt=lars batch=2500 lr_base=3"


def labels(comparison: Comparison) -> list[str]:
    return [row.label for row in comparison.rows]


def names(*paths: Path) -> list[str]:
    return [run.path.name for run in read_runs(paths)]


def fails(*paths: Path) -> str:
    with pytest.raises(CompareError) as info:
        read_runs(paths)
    assert info.value.exit_code == 2
    assert len(str(info.value).splitlines()) == 1
    return info.value.cause


def test_runs_are_found_each_once_in_order(tmp_path: Path) -> None:
    b, a = (write_run(tmp_path / "all" / name, 90.0) for name in "ba")
    (tmp_path / "all" / "notes").mkdir()
    (tmp_path / "all" / "README.md").touch()
    extra = write_run(tmp_path / "extra", 80.0)
    (tmp_path / "link").symlink_to(b)
    assert names(b, a) == ["b", "a"]
    assert names(extra, tmp_path / "all") == ["extra", "a", "b"]
    assert names(b, tmp_path / "all", tmp_path / "link", a / ".." / "a") == ["b", "a"]
    assert str(a) in fails(a, a)


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", 90.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "empty"):
        assert str(tmp_path / name) in fails(good, tmp_path / name)
    early = write_run(tmp_path / "early", 0.0, done=0, events=[start(), step(1)])
    assert str(early) in fails(good, early)
    bare = write_run(tmp_path / "bare", 90.0)
    (bare / "config.toml").unlink()
    assert str(bare) in fails(good, bare)
    damaged = write_run(tmp_path / "damaged", 90.0)
    (damaged / "metrics.jsonl").write_text("{broken\n", "utf-8")
    assert str(damaged) in fails(good, damaged)


def test_a_run_without_evaluation_below_a_folder_is_noted(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, 90.0)
    write_run(tmp_path / "early", 0.0, done=0, events=[start(), step(1)])
    notes: list[str] = []
    assert len(read_runs([tmp_path], notes)) == 2
    assert len(notes) == 1
    assert str(tmp_path / "early") in notes[0]


def test_the_figures_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 90.0, val_loss=0.25, run__seed=7, ranks=2)
    (folder / "metrics.rank1.jsonl").write_text("broken, but not read\n", "utf-8")
    run = ComparedRun.read(folder)
    assert run.outcome.best_top1 == 93.0
    assert (run.top1, run.val_loss, run.seed, run.epochs_planned) == (90.0, 0.25, 7, 4.0)
    assert run.settings["ranks"] == 2
    assert {"run.seed", "run.name", "run.output", "run.resume"}.isdisjoint(run.settings)
    other = write_run(tmp_path / "b", 90.0, done=2, val_loss=math.nan, without=["run.epochs"])
    nan = ComparedRun.read(other)
    assert (nan.val_loss, nan.epochs_planned) == (None, 4.0)


@pytest.mark.parametrize(
    ("done", "stopped_by", "complete"),
    [(4, None, True), (2, "target", True), (2, None, False), (2, "signal", False)],
)
def test_what_is_complete(
    tmp_path: Path, done: int, stopped_by: str | None, complete: bool
) -> None:
    run = ComparedRun.read(write_run(tmp_path / "a", 90.0, done=done, stopped_by=stopped_by))
    assert run.complete is complete


def test_spread_and_difference() -> None:
    a, b = Spread.of([90.0, 92.0, 94.0]), Spread.of([88.0, 90.0])
    assert a == Spread(3, 92.0, 2.0, 90.0, 94.0)
    assert Difference.between(a, b) == Difference(3.0, pytest.approx(math.sqrt(4 / 3 + 2 / 2)))
    single = Spread.of([88.0])
    assert single.std is None
    assert Difference.between(a, single) == Difference(4.0, None)
    assert Difference.between(single, a) == Difference(-4.0, None)


@pytest.mark.parametrize("other", [{"optim__lr_base": 0.3}, {"ranks": 2}, {"run__threads": 2}])
def test_any_other_difference_makes_a_row(tmp_path: Path, other: dict[str, Any]) -> None:
    rows = compare(tmp_path, {}, {"top1": 92.0, **other}, {"top1": 94.0}).rows
    assert [(row.top1.mean, row.top1.n) for row in rows] == [(92.0, 2), (92.0, 1)]


def test_figures_of_a_row(tmp_path: Path) -> None:
    (row,) = compare(
        tmp_path,
        {"val_loss": 0.2, "images_per_s": 100.0},
        {"val_loss": 0.4, "images_per_s": 900.0, "done": 3, "stopped_by": "target", "run__seed": 1},
        {"val_loss": 0.6, "images_per_s": 200.0, "run__seed": 2},
    ).rows
    assert row.val_loss == pytest.approx(0.4)
    assert (row.median("images_per_s"), row.median("train_s")) == (200.0, 600.0)
    assert (row.epochs_done, row.first.epochs_planned) == ((3.0, 4.0), 4.0)
    assert row.skipped_steps == 0
    (nan,) = compare(tmp_path / "nan", {}, {"val_loss": math.nan}).rows
    assert nan.val_loss is None, "a missing loss is not averaged away"


def test_rows_and_their_differences(ablation: Comparison) -> None:
    path = ablation.rows[2].first.path
    assert labels(ablation) == [SGD, LARS, f"{LARS} run={path}"]
    sgd, lars, half = ablation.rows
    assert ablation.baseline is sgd
    assert sgd.difference is half.difference is None
    # Sample variances 0.08 of two runs, 0.01 of three.
    error = (0.08 / 2 + 0.01 / 3) ** 0.5
    assert lars.difference == Difference(pytest.approx(-1.1), pytest.approx(error))
    assert (half.top1.n, half.complete) == (1, False)
    (incomplete,) = ablation.notes
    assert "not complete" in incomplete


def test_a_baseline_by_label_path_or_folder_name(tmp_path: Path) -> None:
    runs = read_runs(write_ablation(tmp_path))
    for given in (LARS, str(tmp_path / "lars-1"), "lars-1"):
        comparison = Comparison.of(runs, baseline=given)
        assert comparison.baseline.label == LARS
        assert comparison.rows[0].difference is not None
    assert Comparison.of(runs, ["lars-1=LARS"], "LARS").baseline.label == "LARS"
    incomplete = Comparison.of(runs, baseline="lars-3")
    assert [row.difference for row in incomplete.rows] == [None] * 3
    assert any("no differences" in note for note in incomplete.notes)


@pytest.mark.parametrize(
    ("given", "baseline", "field"),
    [
        ([], "larz-1", "--baseline"), (["larz-1=x"], None, "--label"), (["LARS"], None, "--label"),
        (["lars-0="], None, "--label"), (["lars-0=x", "sgd-0=x"], None, "--label"),
    ],
)  # fmt: skip
def test_bad_labels_are_refused(
    tmp_path: Path, given: list[str], baseline: str | None, field: str
) -> None:
    runs = read_runs(write_ablation(tmp_path))
    with refused(field) as info:
        Comparison.of(runs, given, baseline)
    if "larz" in str(info.value):
        assert "did you mean 'lars-1'?" in info.value.remedy


def test_a_folder_name_in_two_rows_is_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(lr) / "run", 90.0, optim__lr_base=lr) for lr in (0.1, 0.2)]
    with pytest.raises(ConfigError, match="several rows"):
        Comparison.of(read_runs(runs), baseline="run")
    assert Comparison.of(read_runs(runs), baseline=str(runs[1])).baseline.label == "lr_base=0.2"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"run.epochs": 10, "data.dir": "/a"}, {"run.epochs": 20, "data.dir": "/b"}], ["run.epochs"]),
        ([{"data.dir": "/a"}, {"data.dir": "/b"}], ["data.dir"]),
        (
            [{"optim.name": "sgd", "optim.lr": 1}, {"optim.name": "lars", "optim.lr": 2}],
            ["optim.name", "optim.lr"],
        ),
        (
            [{"optim.lr": 1}, {"optim.lr": 2}, {"optim.lr": 2, "optim.nesterov": True}],
            ["optim.lr", "optim.nesterov"],
        ),
    ],
)  # fmt: skip
def test_labels_have_the_rate_and_what_distinguishes_rows(
    rows: list[dict[str, Any]], names: list[str]
) -> None:
    assert naming_settings(rows, differing_settings(rows)) == names


def test_the_table_has_what_differs_and_the_caption_what_does_not(
    ablation: Comparison, tmp_path: Path
) -> None:
    table = compare_table(ablation)
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert cells[1] == {
        "row": LARS, "n": "3", "top-1 %": "93.10 ± 0.10", "min–max": "93.00–93.20",
        "Δ points": "-1.10 ± 0.21", "val loss": "0.5000", "images/s": "2,000",
        "train time": "10 min 0 s", "epochs": "4",
    }  # fmt: skip
    assert cells[0]["Δ points"] == "baseline"
    half = cells[2]
    assert (half["row"], half["min–max"], half["Δ points"], half["epochs"]) == (
        f"{ablation.rows[2].label} *", "", "–", "2 of 4"
    )  # fmt: skip
    assert compare_caption(ablation) == "all: model resnet18, ranks 1, skipped steps 0"
    batches = [write_run(tmp_path / str(b), 90.0, run__global_batch_size=b) for b in (250, 500)]
    assert "batch" not in compare_table(Comparison.of(read_runs(batches))).columns, "in the label"
    assert "batch" in compare_table(Comparison.of(read_runs(batches), ["250=small"])).columns


def test_markdown(tmp_path: Path) -> None:
    runs = read_runs(write_ablation(tmp_path))
    lines = compare_markdown(Comparison.of(runs, ["sgd-0=S|G*D"])).splitlines()
    assert lines[3] == "| --- |" + " --: |" * 9
    assert lines[4].startswith("| S\\|G\\*D | 2 | 94.20 ± 0.28 |")
    assert {line.count(" | ") for line in lines[2:7]} == {9}
    assert lines[8].startswith("\\* ")


def test_json_has_every_number_unrounded(ablation: Comparison, tmp_path: Path) -> None:
    found = compare_json(ablation)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["baseline"], found["differing"]) == (
        SGD, ["optim.name", "run.global_batch_size", "optim.lr_base"]
    )  # fmt: skip
    sgd, lars, half = found["rows"]
    assert list(lars["settings"].values()) == ["lars", 2500, 3.0]
    assert (lars["n"], lars["top1_min"], lars["top1_max"]) == (3, 93.0, 93.2)
    assert (lars["top1_std"], lars["difference_points"]) == pytest.approx((0.1, -1.1))
    assert lars["difference_standard_error"] == pytest.approx((0.08 / 2 + 0.01 / 3) ** 0.5)
    assert sgd["difference_points"] is None
    assert lars["seeds"] == [run["seed"] for run in lars["runs"]] == [0, 1, 2]
    assert lars["runs"][1]["path"] == str(tmp_path / "lars-1")
    assert (half["complete"], half["epochs_done_max"], half["epochs_planned"]) == (False, 2.0, 4.0)
    assert half["runs"][0]["state"] == "unfinished"


def test_the_page_has_charts_settings_and_runs(ablation: Comparison, tmp_path: Path) -> None:
    page = read_page(render_comparison(ablation))
    assert page.tags.count("svg") == 2
    assert len(page.tables["Result"]) == 4
    assert page.tables["Settings that differ"][:2] == [
        ("row", "optim.name", "run.global_batch_size", "optim.lr_base"),
        (SGD, "sgd", "250", "0.2"),
    ]
    runs = page.tables["Runs"]
    assert runs[2][:4] == (SGD, str(tmp_path / "sgd-1"), "1", "94.40")
    assert [row[-1] for row in runs[1:]] == ["finished"] * 5 + ["unfinished"]
    seeds = read_page(render_comparison(compare(tmp_path / "seeds", {}, {"run__seed": 1})))
    assert "Settings that differ" not in seeds.tables


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\"'&\x1b"
    for place, name in enumerate(("a", "<b>&")):
        write_run(tmp_path / name, 90.0, optim__name=f"{hostile}{place}", run__name=hostile)
    page = read_page(render_comparison(Comparison.of(read_runs([tmp_path]), ["a=<i>x</i>"])))
    assert {"b", "i"}.isdisjoint(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.text


def test_charts_have_a_line_per_row_and_thin_ones_for_its_seeds(ablation: Comparison) -> None:
    for chart in compare_charts(ablation):
        named = [line for line in chart.lines if line.name]
        assert [line.name for line in named] == labels(ablation)
        assert [line.colour for line in named] == [1, 2, 3]
        assert [line.colour for line in chart.lines if line.faint] == [1, 1, 2, 2, 2]
        assert (chart.x_range, chart.legend) == ((0.0, 4.0), False)
    accuracy = compare_charts(ablation)[0]
    sgd, half = accuracy.lines[2], accuracy.lines[-1]
    assert [x for x, _ in sgd.points] == [1, 2, 3, 4]
    assert sgd.points[-1][1] == pytest.approx(94.2)
    assert [x for x, _ in half.points] == [1, 2]
    assert [series_look(row) for row in (0, 7, 8, 16)] == [
        (1, False), (8, False), (1, True), (1, False)
    ]  # fmt: skip


def test_the_loss_is_the_median_of_an_epoch_or_of_a_part_of_a_short_run(tmp_path: Path) -> None:
    _, short = compare_charts(compare(tmp_path / "short", {}, {"optim__lr_base": 1}))
    assert short.lines[0].points == [
        (pytest.approx(n / 5), pytest.approx(10.0 / n)) for n in range(1, 21)
    ]
    events = events_of(90.0, epochs=30, done=30, batch=250, ranks=1, loss=0.5)
    spiked = [
        # Within an epoch: 1, 1, 1, 1 and a spike that must not bend the curve.
        StepEvent(e.step, e.epoch, 1.0 if e.step % 5 else 1e6, 0.1, 1.0, 0.1, 0.1)
        if isinstance(e, StepEvent)
        else e
        for e in events
    ]
    common = {"run__epochs": 30, "events": spiked}
    _, long = compare_charts(compare(tmp_path / "long", common, {**common, "optim__lr_base": 1}))
    assert long.lines[0].points == [(float(epoch), 1.0) for epoch in range(1, 31)]
