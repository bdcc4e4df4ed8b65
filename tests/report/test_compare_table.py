"""The table says what differs, the caption what does not."""

from pathlib import Path

import pytest

from paceline.report.compare_page import (
    caption,
    compare_table,
    differing_table,
    markdown,
    runs_table,
)
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import write_ablation, write_run


@pytest.fixture
def ablation(tmp_path: Path) -> Comparison:
    return Comparison.of(read_runs(write_ablation(tmp_path)))


def test_the_table(ablation: Comparison) -> None:
    table = compare_table(ablation)
    assert table.columns == (
        "row", "n", "top-1 %", "min–max", "Δ points", "val loss", "images/s", "train time",
        "epochs", "batch",
    )  # fmt: skip
    assert table.rows[:2] == (
        ("optim.name=sgd", "2", "94.20 ± 0.28", "94.00–94.40", "baseline", "0.5000", "1,000",
         "10 min 0 s", "4", "250"),
        ("optim.name=lars", "3", "93.10 ± 0.10", "93.00–93.20", "-1.10 ± 0.21", "0.5000", "2,000",
         "10 min 0 s", "4", "2,500"),
    )  # fmt: skip
    half = dict(zip(table.columns, table.rows[2], strict=True))
    assert half["row"] == "optim.name=lars seed=3 *"
    assert (half["top-1 %"], half["min–max"], half["Δ points"]) == ("60.00", "", "–")
    assert half["epochs"] == "2 of 4"


def test_what_all_rows_share_stands_in_the_caption(ablation: Comparison, tmp_path: Path) -> None:
    assert caption(ablation) == "all: model resnet18, 1 rank, no skipped steps"
    runs = [write_run(tmp_path / f"m{m}", 90.0, optim__lr_base=m) for m in (0.5, 0.6)]
    comparison = Comparison.of(read_runs(runs))
    assert caption(comparison) == (
        "all: model resnet18, optimizer sgd, n = 1, 4 epochs, global batch 250, 1 rank, "
        "no skipped steps"
    )
    assert compare_table(comparison).columns == (
        "row", "top-1 %", "Δ points", "val loss", "images/s", "train time"
    )  # fmt: skip


def test_a_column_that_the_names_show_is_left_out_until_they_are_changed(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(b), 90.0, run__global_batch_size=b) for b in (250, 500)]
    assert "batch" not in compare_table(Comparison.of(read_runs(runs))).columns
    assert "batch" in compare_table(Comparison.of(read_runs(runs), ["250=small"])).columns


def test_epochs_of_runs_that_reached_their_target(tmp_path: Path) -> None:
    for seed, done in enumerate((2, 3)):
        write_run(tmp_path / str(seed), 90.0, done=done, stopped_by="target", run__seed=seed)
    assert "2–3 of 4 epochs" in caption(Comparison.of(read_runs([tmp_path])))


def test_all_that_differs_and_all_runs(ablation: Comparison, tmp_path: Path) -> None:
    table = differing_table(ablation)
    assert table.columns == ("row", "optim.name", "run.global_batch_size", "optim.lr_base")
    assert table.rows[:2] == (
        ("optim.name=sgd", "sgd", "250", "0.2"),
        ("optim.name=lars", "lars", "2500", "3"),
    )
    runs = runs_table(ablation)
    assert len(runs.rows) == 6
    assert runs.rows[1][:4] == ("optim.name=sgd", str(tmp_path / "sgd-1"), "1", "94.40")
    assert [row[-1] for row in runs.rows] == ["finished"] * 5 + ["unfinished"]


def test_markdown(tmp_path: Path) -> None:
    runs = read_runs(write_ablation(tmp_path))
    lines = markdown(Comparison.of(runs, ["sgd-0=S|G*D"])).splitlines()
    assert lines[0] == "all: model resnet18, 1 rank, no skipped steps"
    assert lines[2].startswith("| row | n | top-1 % | min–max |")
    assert lines[3] == "| --- |" + " --: |" * 9
    assert lines[4].startswith("| S\\|G\\*D | 2 | 94.20 ± 0.28 |")
    assert lines[8].startswith("\\* not complete")
    assert {line.count(" | ") for line in lines[2:7]} == {9}
