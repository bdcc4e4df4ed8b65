"""The page of several runs: rows with what differs, and their curves in the same charts."""

import re
from pathlib import Path
from typing import Any

from paceline.report.live_run import LiveRun
from paceline.report.runs_page import overview
from report.conftest import MakeRun
from report.html_reader import Page
from report.made_up_runs import evaluation, start, step


def made(make_run: MakeRun, name: str, config: dict[str, Any] | None, top1: float) -> Path:
    steps = [step(n) for n in range(1, 200)]
    return make_run(
        [start(), *steps, evaluation(100, top1), evaluation(199, top1 - 1)],
        name=name, config=config,
    )  # fmt: skip


def page_of(*folders: Path) -> tuple[Page, str]:
    runs = [LiveRun(folder) for folder in folders]
    for run in runs:
        run.refresh()
    _, parts = overview([folder.name for folder in folders], runs, 0)
    return Page("\n".join(parts)), "\n".join(parts)


def test_rows_name_what_differs_and_lines_have_the_number_of_their_run(
    make_run: MakeRun, tmp_path: Path
) -> None:
    shared = {"model": {"name": "resnet18"}}
    configs: list[dict[str, Any] | None] = [
        {**shared, "run": {"seed": 0}, "optim": {"name": "sgd", "lr": 0.1}},
        {**shared, "run": {"seed": 1}, "optim": {"name": "lars", "lr": 3.0}},
        None,
    ]
    folders = [made(make_run, f"r{n}", config, 80 + n) for n, config in enumerate(configs)]
    page, text = page_of(*folders, tmp_path / "later")
    head, *rows = page.tables[""]
    assert head[:5] == ("run", "state", "differs in", "step", "top-1 %")
    assert rows[0][:6] == ("r0", "unfinished", "opt=sgd lr=0.1 seed=0", "199", "79.00", "80.00")
    assert rows[1][2] == "opt=lars lr=3 seed=1"
    assert rows[2][2:5] == ("", "199", "81.00")
    assert rows[3] == ("later", "unknown", "", *["–"] * 6)
    assert 'data-value="79.0">79.00<' in text, "sorted by the number"
    for chart in re.findall(r"<svg class=.chart. .*?</svg>", text):
        assert re.findall(r'<polyline[^>]*data-run="(\d)"', chart) == ["0", "1", "2"]
    assert text.count("<polyline") == 4 * 3
