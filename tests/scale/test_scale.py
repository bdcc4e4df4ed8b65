"""A part of `make scale-test` with 64 ranks, and whether a wrong line would be noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scale.__main__ import problem
from scale.forked_job import RankResult, Scenario

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and reads load averages")
ROOT = Path(__file__).parent.parent.parent


def run_scale(*arguments: str) -> list[dict[str, Any]]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "scale", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr, [record["broken"] for record in records])
    return records


def test_64_ranks_meet_agree_and_name_who_is_missing_or_stalls() -> None:
    kinds = ["healthy", "fault", "missing node", "stall"]
    found = run_scale("--ranks", "64", "--timeout", "3", "--only", *kinds)
    assert [record["kind"] for record in found] == kinds
    assert [record["broken"] for record in found] == [""] * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_256_ranks_in_every_kind_of_trouble() -> None:
    run_scale("--ranks", "256", "--timeout", "5")


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
