"""A small seeded part of `make fuzz`, and that its harness notices what it is there for.

In processes of their own: the harness forks, which a test runner with threads should not.
"""

from __future__ import annotations

from pathlib import Path

from programs import run_python


def test_mutated_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    done = run_python("-m", "fuzz", "--seed", "7", "--count", "1500", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_harness_notices_every_kind_of_failure() -> None:
    """Every way in which a parser can fail is a finding, and only the bad input is lost."""
    done = run_python("-m", "fuzz.broken_targets")
    assert done.stdout.splitlines() == [
        "_crash [crash by SIGSEGV] 4 0",
        "_traceback [traceback] 4 0",
        "_hang [hang] 4 0",
        "_memory [memory] 4 0",
        "_sound [] 3 2",
    ], done.stderr
