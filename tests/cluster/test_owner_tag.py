"""Tags tell whether their owner lives, and leave what is not ours alone."""

from __future__ import annotations

import os
import subprocess
import sys

from cluster.traces import RANK_ENV
from paceline.bench.cluster.network import new_tag, owner_is_gone

PRINT_A_TAG = "from paceline.bench.cluster.network import new_tag; print(new_tag(), end='')"


def test_tags_differ() -> None:
    assert new_tag() != new_tag()


def test_ours_is_alive() -> None:
    assert not owner_is_gone(new_tag())
    assert not owner_is_gone(f"{new_tag()}-host0")


def test_a_process_that_has_ended_is_gone() -> None:
    command = [sys.executable, "-c", PRINT_A_TAG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=RANK_ENV) as process:
        assert process.stdout is not None
        tag = process.stdout.read()
        # As long as nobody has taken its exit code, it is there, but not alive.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner_is_gone(f"{tag}-switch")
    assert owner_is_gone(tag)


def test_a_process_that_got_the_same_id_is_not_the_owner() -> None:
    start, pid, ticks, serial = new_tag().split("-")
    assert owner_is_gone(f"{start}-{pid}-{int(ticks) + 1}-{serial}-host0")


def test_names_of_others_are_left_alone() -> None:
    for name in ("blue", "paceline-host0", "paceline-x-1-2", "other-paceline-1-1-1"):
        assert not owner_is_gone(name)
