"""Fixtures: run folders made up for the tests."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from paceline.core.events import Event
from report.made_up_runs import CONFIG, SUMMARY, finished_events, write_events

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(events, summary=…, config=…, ranks={1: events})` → the run folder."""

    def make(
        events: Iterable[Event],
        *,
        summary: dict[str, Any] | None = None,
        config: dict[str, Any] | None = CONFIG,
        ranks: dict[int, Iterable[Event]] | None = None,
        name: str = "run",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_events(folder / "metrics.jsonl", events)
        for rank, of_rank in (ranks or {}).items():
            write_events(folder / f"metrics.rank{rank}.jsonl", of_rank)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
        if config is not None:
            (folder / "config.toml").write_text(tomli_w.dumps(config), "utf-8")
        return folder

    return make


@pytest.fixture
def finished_run(make_run: MakeRun) -> Path:
    return make_run(finished_events(), summary=SUMMARY)
