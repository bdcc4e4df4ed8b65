"""A part of `make scale-test` with 64 ranks, and a check that it notices wrong lines."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from paceline.comm import heartbeats
from programs import run_python
from scale.__main__ import problem
from scale.forked_job import RankResult, Scenario
from scale.training_job import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and reads load averages")


def run_scale(*arguments: str, limit_s: float = 250) -> list[dict[str, Any]]:
    done = run_python("-m", "scale", *arguments, timeout_s=limit_s)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr, [record["broken"] for record in records])
    return records


def test_64_ranks_meet_agree_and_name_who_is_missing_or_stalls() -> None:
    kinds = ["healthy", "fault", "missing node", "stall"]
    found = run_scale("--ranks", "64", "--timeout", "8", "--patient", "--only", *kinds)
    assert [record["kind"] for record in found] == kinds
    assert [record["broken"] for record in found] == [""] * 4


def test_bad_input_ends_16_ranks_with_one_line() -> None:
    kinds = ["differs", "twice", "dies meeting", "dies"]
    patient = ("--timeout", "8", "--patient")
    found = run_scale("--ranks", "16", *patient, "--only", *kinds, "--phases", "0", "-1")
    assert [record["kind"] for record in found] == [*kinds[:-1], *["dies"] * 2]
    assert [record["broken"] for record in found] == [""] * 5


def test_a_rank_that_dies_in_the_first_step_is_the_only_one_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeats, "_ANSWER_S", 10.0)  # more ranks than cores; forks inherit it
    found = train(9, 4, killed=5)
    lines = {row["line"].partition("rank 0: ")[2] or row["line"] for row in found}
    assert len(found) == 8
    assert len(lines) == 1, lines
    assert "rank 5 gives no sign of life" in lines.pop()


def test_steps_of_9_ranks_make_no_request_to_the_store_and_write_no_file() -> None:
    found = train(9, 12)
    assert [row["line"] for row in found] == [""] * 9
    assert sum(row["requests"] for row in found) == 0
    assert sum(row["files"] for row in found if row["rank"]) == 0
    assert all(row["steps"] > 0 for row in found), "or nothing was counted"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["rank 0: no images; check data.dir"] * 4, ""),
        (["no images; check data.dir"] * 3, "3 of 4 ranks ended by themselves"),
        (["no images; check data.dir"] * 3 + ["lost the others"], "rank 3: 'lost the others'"),
    ],
)
def test_a_rank_with_another_line_or_none_is_noticed(lines: list[str], found: str) -> None:
    results = [RankResult(rank, line=line) for rank, line in enumerate(lines)]
    assert problem(Scenario("fault", 4), results) == found
