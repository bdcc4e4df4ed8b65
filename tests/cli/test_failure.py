from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.failure import Failure
from paceline.comm.agreement import PeerError
from paceline.core.errors import CommError, ConfigError, PacelineError

CASES = [
    Failure("optim.lr = 0: too small", 2),
    Failure("TypeError: no", 1, trace="Traceback\n  line\n"),
    Failure("another rank is gone", 1, consequence=True),
]


@pytest.mark.parametrize("failure", CASES)
def test_what_a_rank_records_the_launcher_reads(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "error.json"))
    failure.record()
    message = json.loads((tmp_path / "a" / "error.json").read_text())["message"]
    assert Failure.from_record(message, 77) == failure
    # torchrun's own summary prints this field under "traceback".
    assert message["extraInfo"]["py_callstack"] == (failure.trace or failure.line)


def test_a_message_of_torchs_own_is_none_of_ours() -> None:
    assert Failure.from_record("Signal 9 (SIGKILL) received by PID 7", -9) is None


def test_a_lost_peer_is_a_consequence_and_a_mistake_is_not() -> None:
    assert Failure.of(PeerError("gone")).consequence
    mistake = Failure.of(ConfigError("run.seed", -1, "too small"))
    assert (mistake.consequence, mistake.exit_code) == (False, 2)


def test_one_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    CASES[0].show()
    assert capsys.readouterr().err == "paceline: error: optim.lr = 0: too small\n"


# A launcher that starts a rank, whose connection to it breaks, and that itself ends a moment later.
LAUNCHER = """
import os, subprocess, sys, time
env = os.environ | {"PACELINE_LAUNCHER": str(os.getpid())}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, stdout=subprocess.PIPE)
rank.stdout.readline()
if sys.argv[2] == "killed":
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
rank.wait()
"""
RANK = """
from paceline.cli.failure import Failure
print(flush=True)
Failure("the store is gone", 1, consequence=True).tell()
"""


@pytest.mark.parametrize(("ends", "shown"), [("killed", True), ("stays", False)])
def test_a_rank_speaks_for_itself_where_its_launcher_is_about_to_end(
    ends: str, shown: bool
) -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK, ends]
    # It returns when the last writer has closed the pipe, so when the rank has ended.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=os.environ)
    assert ("paceline: error: the store is gone" in done.stderr) == shown


def test_errors_between_ranks_may_come_from_a_lost_launcher() -> None:
    """Only a peer's is a consequence; for all of them the launcher is looked at again."""
    assert Failure.of(CommError("the store is gone")).between_ranks
    assert not Failure.of(CommError("the store is gone")).consequence
    assert not Failure.of(PacelineError("no such file")).between_ranks
