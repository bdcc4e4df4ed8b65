"""The charts draw the mean of a row's seeds, and the seeds behind it."""

from pathlib import Path

import pytest

from paceline.core.events import StepEvent
from paceline.report.compare_page import compare_charts, series_look
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import events_of, write_ablation, write_run


def test_one_line_a_row_over_its_seeds(tmp_path: Path) -> None:
    accuracy, training = compare_charts(Comparison.of(read_runs(write_ablation(tmp_path))))
    for chart in (accuracy, training):
        named = [line for line in chart.lines if line.name]
        assert [line.name for line in named] == [
            "optim.name=sgd", "optim.name=lars", "optim.name=lars seed=3"
        ]  # fmt: skip
        assert [line.colour for line in named] == [1, 2, 3]
        assert [line.colour for line in chart.lines if line.faint] == [1, 1, 2, 2, 2]
        assert all(line.faint for line in chart.lines if not line.name)
        assert (chart.x_range, chart.legend) == ((0.0, 4.0), False)
    sgd, half = accuracy.lines[2], accuracy.lines[-1]
    assert [x for x, _ in sgd.points] == [1, 2, 3, 4]
    assert sgd.points[-1][1] == pytest.approx(94.2)
    assert [x for x, _ in half.points] == [1, 2]


def test_the_mean_ends_where_the_first_seed_does(tmp_path: Path) -> None:
    for seed, done in enumerate((2, 4)):
        write_run(tmp_path / str(seed), 90.0, done=done, stopped_by="target", run__seed=seed)
    accuracy, _ = compare_charts(Comparison.of(read_runs([tmp_path])))
    assert [len(line.points) for line in accuracy.lines] == [2, 4, 2]


def test_a_short_runs_loss_is_cut_finer_than_by_the_epoch(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(lr), 90.0, optim__lr_base=lr) for lr in (1, 2)]
    _, training = compare_charts(Comparison.of(read_runs(runs)))
    assert training.note == "median of 0.2 epochs"
    assert training.lines[0].points == [
        (pytest.approx(n / 5), pytest.approx(10.0 / n)) for n in range(1, 21)
    ]


def test_a_long_runs_loss_is_the_median_of_each_epoch(tmp_path: Path) -> None:
    events = events_of(90.0, epochs=30, done=30, batch=250, ranks=1, loss=0.5)
    spiked = [
        # Within an epoch: 1, 1, 1, 1 and a spike that must not bend the curve.
        StepEvent(e.step, e.epoch, 1.0 if e.step % 5 else 1e6, 0.1, 1.0, 0.1, 0.1)
        if isinstance(e, StepEvent)
        else e
        for e in events
    ]
    for lr in (1, 2):
        write_run(tmp_path / str(lr), 90.0, run__epochs=30, optim__lr_base=lr, events=spiked)
    _, training = compare_charts(Comparison.of(read_runs([tmp_path])))
    assert training.note == "median of an epoch"
    assert training.lines[0].points == [(float(epoch), 1.0) for epoch in range(1, 31)]


def test_colours_go_round_and_the_next_round_is_dashed() -> None:
    assert [series_look(place) for place in (0, 7, 8, 16)] == [
        (1, False), (8, False), (1, True), (1, False)
    ]  # fmt: skip
