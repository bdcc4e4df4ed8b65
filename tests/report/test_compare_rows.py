"""Rows hold the runs of one setting, and count what they should."""

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.report.compare_runs import ComparedRun
from paceline.report.comparison import CompareRow, Difference, Spread, grouped
from report.made_up_ablations import write_run


def rows_of(home: Path, *runs: dict[str, Any]) -> list[CompareRow]:
    return grouped(
        ComparedRun.read(write_run(home / str(place), **run)) for place, run in enumerate(runs)
    )


def test_spread_is_that_of_a_sample() -> None:
    assert Spread.of([90.0, 92.0, 94.0]) == Spread(3, 92.0, 2.0, 90.0, 94.0)
    assert Spread.of([90.0]) == Spread(1, 90.0, None, 90.0, 90.0)


def test_a_difference_and_its_standard_error() -> None:
    a, b = Spread.of([90.0, 92.0, 94.0]), Spread.of([88.0, 90.0])
    difference = Difference.between(a, b)
    assert difference.points == 3.0
    assert difference.standard_error == pytest.approx(math.sqrt(4 / 3 + 2 / 2))
    assert Difference.between(a, Spread.of([88.0])) == Difference(4.0, None)
    assert Difference.between(Spread.of([88.0]), a) == Difference(-4.0, None)


def test_seeds_names_and_places_make_no_row_of_their_own(tmp_path: Path) -> None:
    (row,) = rows_of(
        tmp_path,
        {"top1": 90.0},
        {"top1": 92.0, "run__seed": 1, "run__name": "b", "run__output": "x", "run__resume": "y"},
    )
    assert row.top1 == Spread(2, 91.0, math.sqrt(2), 90.0, 92.0)


@pytest.mark.parametrize("other", [{"optim__lr_base": 0.3}, {"ranks": 2}, {"run__threads": 2}])
def test_any_other_difference_does(tmp_path: Path, other: dict[str, Any]) -> None:
    rows = rows_of(tmp_path, {"top1": 90.0}, {"top1": 92.0, **other}, {"top1": 94.0})
    assert [row.top1.mean for row in rows] == [92.0, 92.0]
    assert [len(row.runs) for row in rows] == [2, 1]


def test_incomplete_runs_stay_alone(tmp_path: Path) -> None:
    half = {"top1": 50.0, "done": 2}
    rows = rows_of(tmp_path, half, {"top1": 90.0}, half, {"top1": 92.0, "run__seed": 1})
    assert [(row.top1.n, row.complete) for row in rows] == [(1, False), (2, True), (1, False)]
    assert rows[1].top1.mean == 91.0


def test_figures_of_a_row(tmp_path: Path) -> None:
    (row,) = rows_of(
        tmp_path,
        {"top1": 90.0, "val_loss": 0.2, "images_per_s": 100.0},
        {"top1": 90.0, "val_loss": 0.4, "images_per_s": 900.0, "done": 3, "stopped_by": "target"},
        {"top1": 90.0, "val_loss": 0.6, "images_per_s": 200.0},
    )
    assert row.val_loss == pytest.approx(0.4)
    assert row.images_per_s == 200.0
    assert row.train_s == 600.0
    assert (row.epochs_done, row.epochs_planned) == ((3.0, 4.0), 4.0)
    assert (row.global_batch_size, row.world_size, row.skipped_steps) == (250, 1, 0)


def test_a_loss_that_is_missing_is_not_averaged_away(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"top1": 90.0}, {"top1": 90.0, "val_loss": math.nan})
    assert row.val_loss is None
