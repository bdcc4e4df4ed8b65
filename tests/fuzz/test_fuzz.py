"""A small seeded part of `make fuzz`, and that its harness notices what it is there for.

In processes of their own: the harness forks, which a test runner with threads should not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_mutated_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    done = run("fuzz", "--seed", "7", "--count", "1500", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_harness_notices_every_kind_of_failure() -> None:
    """Every way in which a parser can fail is a finding, and only the bad input is lost."""
    done = run("fuzz.broken_targets")
    assert done.stdout.splitlines() == [
        "_crash [crash by SIGSEGV] 4 0",
        "_traceback [traceback] 4 0",
        "_hang [hang] 4 0",
        "_memory [memory] 4 0",
        "_sound [] 3 2",
    ], done.stderr
