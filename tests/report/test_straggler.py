"""Who arrives last, from how long everybody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.run_charts import run_charts
from paceline.report.run_files import RunFiles
from paceline.report.tables import ExposedWaits, result_rows
from report.made_up_runs import start, step


def made_up(waits: list[list[float]], world_size: int | None = None) -> RunFiles:
    """`waits`: for each rank the seconds of each step; steps take 0.084 s."""
    ranks = {
        rank: tuple(
            event.to_dict()
            for event in [
                start(world_size=world_size or len(waits)),
                *(step(n, exposed_comm_s=wait) for n, wait in enumerate(of_rank, start=1)),
            ]
        )
        for rank, of_rank in enumerate(waits)
    }
    return RunFiles(Path("run"), ranks, None, {})


def test_the_last_rank_waits_least_and_is_named() -> None:
    slow, fast = [0.002] * 8 + [0.05], [0.030] * 8 + [0.01]
    found = ExposedWaits.of(made_up([fast, slow, fast])).straggler()
    assert found is not None
    assert (found.rank, found.lost_s) == (1, pytest.approx(0.028))
    rows = dict(result_rows(made_up([fast, slow, fast])))
    assert rows["straggler"] == "rank 1: last in 89 % of the steps, others wait 28 ms"
    assert rows["exposed communication"] == "2 ms a step (2 %)"


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param([[0.001, 0.03] * 5, [0.03, 0.001] * 5], id="they take turns"),
        pytest.param([[0.010] * 10, [0.011] * 10], id="always the same, by nothing"),
        pytest.param([[0.001] * 3, [0.05] * 3], id="too few steps to tell"),
    ],
)
def test_no_straggler(waits: list[list[float]]) -> None:
    run = made_up(waits)
    assert ExposedWaits.of(run).straggler() is None
    rows = dict(result_rows(run))
    assert "straggler" not in rows
    assert "exposed communication" in rows


def test_a_step_that_a_rank_has_not_told_of_names_nobody() -> None:
    waits = ExposedWaits.of(made_up([[0.1] * 7, [0.2] * 6]))
    assert waits.last_ranks() == dict.fromkeys(range(1, 7), 0)


def test_a_chart_of_the_waits_where_there_are_ranks() -> None:
    titles = [chart.title for chart in run_charts(made_up([[0.01] * 9, [0.02] * 9]))]
    assert titles[-1] == "Exposed communication (ms)"
    alone = made_up([[0.0] * 9], world_size=1)
    assert [chart.title for chart in run_charts(alone)] == titles[:-1]
    assert "exposed communication" not in dict(result_rows(alone))


def test_only_rank_0s_file_still_tells_its_wait() -> None:
    run = made_up([[0.021] * 9], world_size=4)
    assert ExposedWaits.of(run).describe() == "21 ms a step (25 %)"
    assert ExposedWaits.of(run).straggler() is None
