"""Where ranks are many, rank 0 alone writes, and still knows the slowest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cli_runs import events
from paceline.config import RunSettings
from paceline.core.events import JsonlWriter, NoteEvent, StartEvent, StepEvent, read_events
from paceline.report import RunFiles
from paceline.report.bottleneck import ExposedWaits
from paceline.report.records import RecordLog
from paceline.train import step_records
from paceline.train.step_records import RARE_EVENTS, each_rank_writes
from ranks import run_ranks
from small_runs import run_small


def _run(rank: int, output: str, each: int, values: dict[str, Any]) -> dict[str, Any]:
    with patch.object(step_records, "_EACH_WRITES", each):
        return run_small(output, **values).summary


def test_only_rank_0_writes_and_records_how_the_ranks_spread(tmp_path: Path) -> None:
    values = {"run__batch_size": 8}
    on, off = (
        run_ranks(2, _run, str(tmp_path / mode), each, values)
        for mode, each in (("on", 2), ("off", 1))
    )
    assert on[0]["weights_sha256"] == off[0]["weights_sha256"]
    assert (tmp_path / "on/metrics.rank1.jsonl").exists()
    assert not list((tmp_path / "off").glob("metrics.rank*"))
    spread = events(tmp_path / "off", "ranks")
    assert [event["step"] for event in spread] == list(range(1, off[0]["steps"] + 1))
    assert all(event["ranks"] == 2 for event in spread)
    for event in spread:
        times = event["step_s"]
        assert times["min"] <= times["median"] <= times["max"]
        assert event["exposed_comm_s"]["rank"] in (0, 1)
    assert not events(tmp_path / "on", "ranks")


def test_the_straggler_is_found_in_what_rank_0_recorded() -> None:
    start: dict[str, Any] = {"event": "start", "step": 0, "world_size": 2048}
    spread = {"min": 0.002, "median": 0.03, "max": 0.04, "rank": 1234, "others": 0.03}
    steps = [
        record
        for step in range(1, 10)
        for record in (
            {"event": "step", "step": step, "step_s": 0.084, "exposed_comm_s": 0.031},
            {"event": "ranks", "step": step, "ranks": 2048, "exposed_comm_s": spread},
        )
    ]
    log = RecordLog()
    for record in (start, *steps):
        log.append(record)
    waits = ExposedWaits.of(RunFiles(Path("run"), {0: log.current()}, None, {}))
    found = waits.straggler()
    assert (found.rank, found.share_last) == (1234, 1.0)
    assert found.lost_s == pytest.approx(0.028)
    assert waits.exposed_s == 0.002


@pytest.mark.parametrize(
    ("steps", "ranks", "each"), [((), 8, True), ((), 9, False), ((10, 30), 2048, True)]
)
def test_who_writes(steps: tuple[int, ...], ranks: int, each: bool) -> None:
    assert each_rank_writes(RunSettings(traced_steps=steps), ranks) == each


def test_other_ranks_write_only_what_rank_0_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "metrics.rank7.jsonl"
    rare = JsonlWriter(path, RARE_EVENTS)
    rare.on_event(StartEvent(0, 10, 5.0, 16, 64))
    rare.on_event(StepEvent(1, 0.1, 1.0, 0.1, 10.0, 0.1, 0.0))
    assert not path.exists()
    rare.on_event(NoteEvent("overloaded"))
    rare.close()
    assert [event["event"] for event in read_events(path)] == ["start", "note"]
