"""`python -m paceline.bench.cluster`: rank 0's output, everybody's exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.traces import PATIENCE_S, RANK_ENV


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.bench.cluster", *arguments],
        env=os.environ | RANK_ENV, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.usefixtures("_machine")
def test_rank_0_is_shown_and_a_failure_is_the_exit_code() -> None:
    say = 'echo "rank $RANK of $WORLD_SIZE"; test $RANK = 0 && exit; sleep 1; echo bad >&2; exit 9'
    done = call("--hosts", "1", "--ranks", "2", "--rate", "100mbit", "--", "sh", "-c", say)
    assert done.returncode == 1
    assert done.stdout == "rank 0 of 2\n"
    assert done.stderr == "rank 1: bad\npaceline: error: the exit codes are [1]\n"


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ranks", "two"), "--ranks = 'two': is not a number; write 4, or 2,1"),
        (("--rate", "200"), "rate = '200': is not a rate of a link"),
        (("--hosts", "2", "--ranks", "1,1,1"), "ranks = [1, 1, 1]: does not fit 2 hosts"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], words: str) -> None:
    done = call(*flags, "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: error: {words}")
    assert done.stderr.count("\n") == 1
