"""A few trials as `make chaos` runs them, and whether a broken invariant would be seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.__main__ import table
from chaos.trial import History, Reference
from programs import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
REFERENCE = Reference(1.0, 0.2, {"steps": 9}, {step: 1 / step for step in range(1, 10)}, "")


@pytest.mark.slow
@pytest.mark.timeout(300)  # processes by the dozen, on a machine that may be busy
def test_a_few_trials(tmp_path: Path) -> None:
    out = tmp_path / "trials.jsonl"
    words = [
        "--seed",
        "3056",
        "--trials",
        "3",
        "--ranks",
        "1",
        "2",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    done = run_python("-m", "chaos", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(record["trial"] for record in records) == [0, 1, 2]
    assert any(attempt.get("killed") for record in records for attempt in record["attempts"])
    assert "3 trials" in done.stdout


def start(step: int, resumed_from: str | None = None) -> dict[str, Any]:
    return {"event": "start", "step": step, "resumed_from": resumed_from}


def done(*steps: int) -> list[dict[str, Any]]:
    return [{"event": "step", "step": step, "loss": 1 / step} for step in steps]


@pytest.mark.parametrize(
    ("events", "broken"),
    [
        ([start(0), *done(1, 2, 3, 4, 5), start(3), *done(4, 5)], ""),
        ([start(0), *done(*range(1, 8)), start(0)], "lost 7 steps, more than 6"),
        ([start(0), *done(1, 2), {"event": "stop", "step": 2}, start(1)], "lost 1 steps, more than 0"),
        ([start(0), *done(1), {"event": "step", "step": 2, "loss": 0.7}], "the loss of step 2 differs"),
    ],
)  # fmt: skip
def test_lost_steps_and_wrong_bits_are_seen(
    tmp_path: Path, events: list[dict[str, Any]], broken: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    history = History(tmp_path, REFERENCE)
    history.update(None)
    assert broken in "; ".join(history.violations)
    assert bool(history.violations) == bool(broken)


def test_what_hit_nobody_is_no_kill() -> None:
    late = {"kind": "kill rank", "too_late": True, "gone_s": 0.0}
    nobody = {"kind": "kill rank", "too_late": False, "gone_s": 3.0}
    hit = {"kind": "kill rank", "too_late": False, "gone_s": 0.5, "lost": 2, "killed": ["rank1"]}
    records = [{"ranks": 2, "attempts": [late, nobody, hit], "violations": []}]
    assert "1 disturbances (1 kills), 2 missed; at most 2 steps lost" in table(records)
