from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.report.expectation import InputStall, bound_by, stall_table
from paceline.report.run_files import RunFiles
from paceline.report.run_page import render, summary_rows
from report.made_up_runs import start, step, write_events


def read_run(path: Path, *stalls: dict[str, float]) -> RunFiles:
    """Steps of 100 ms that stood still as told; the first waits for the pipeline to fill."""
    events = [start(), step(1, step_s=0.1, input_stall_s=9.0, input_stall_causes={"read": 9.0})]
    events += [
        step(n, step_s=0.1, input_stall_s=sum(s.values()), input_stall_causes=s)
        for n, s in enumerate(stalls, start=2)
    ]
    path.mkdir()
    (path / "config.toml").write_text("")
    write_events(path / "metrics.jsonl", events)
    return RunFiles.read(path)


def test_bursts_count_by_their_mean_and_the_largest_cause_comes_first(tmp_path: Path) -> None:
    run = read_run(tmp_path / "run", {}, {}, {"read": 0.04, "decode": 0.12}, {})
    stall = InputStall.of(run)
    assert stall.steps == 4
    assert list(stall.causes) == ["decode", "read"]
    assert stall.main_cause == "decode"
    assert stall.describe() == "40 ms a step (40 %), most of it decode"
    assert bound_by(run) == "input (decode), 40% of a step"
    assert ("waiting for the input", stall.describe()) in summary_rows(run)
    rows = stall_table(run).rows
    assert rows[0] == ("0", "decode", "30 ms", "30.0 %")
    assert "Waiting for the input" in render(run)


def test_a_stall_too_short_to_matter_has_no_cause_in_the_verdict(tmp_path: Path) -> None:
    run = read_run(tmp_path / "run", {"copy": 0.001}, {"copy": 0.001})
    assert InputStall.of(run).describe() == "1 ms a step (1 %)"
    assert bound_by(run) == "compute"


def test_records_from_before_the_field_give_nothing(tmp_path: Path) -> None:
    run = read_run(tmp_path / "run", {})
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for line in lines:
        line.pop("input_stall_s", None)
        line.pop("input_stall_causes", None)
        if line["event"] == "step":
            line["data_s"] = 0.05
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    run = RunFiles.read(tmp_path / "run")
    assert InputStall.of(run).describe() == ""
    assert bound_by(run) == "input, 50% of a step"
    assert stall_table(run).rows == ()
    assert "Waiting for the input" not in render(run)
