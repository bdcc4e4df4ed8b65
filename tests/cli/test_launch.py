"""Ranks and their launcher: failures, root causes, signals, the store, and a launcher that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import paceline.cli.app as command_line
import paceline.cli.launcher_watch as watch
from cli_runs import is_launchers
from paceline.cli.failure import LAUNCHER_VARIABLE, Failure
from paceline.cli.launch import root_cause
from paceline.cli.launcher_watch import Launcher, LauncherWatch, find_launcher
from paceline.cli.supervisor import RankEnd
from paceline.comm.peer_errors import PeerError
from paceline.core.errors import CommError, ConfigError, PacelineError

FAILURES = [
    Failure("optim.lr = 0: too small", 2),
    Failure("TypeError: no", 1, trace="Traceback\n  line\n"),
    Failure("another rank is gone", 1, consequence=True),
]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_launcher_reads_what_a_rank_records(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "error.json"))
    failure.record()
    message = json.loads((tmp_path / "a" / "error.json").read_text())["message"]
    assert Failure.from_record(message, 77) == failure
    # torchrun's own summary prints this field under "traceback".
    assert message["extraInfo"]["py_callstack"] == (failure.trace or failure.line)
    assert Failure.from_record("Signal 9 (SIGKILL) received by PID 7", -9) is None


def test_kinds_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """An error between ranks may come from a lost launcher; only a peer's is a consequence."""
    peer, mistake = Failure.of(PeerError("gone")), Failure.of(ConfigError("run.seed", -1, "small"))
    between, other = Failure.of(CommError("no store")), Failure.of(PacelineError("no file"))
    assert [f.consequence for f in (peer, between, mistake, other)] == [True, False, False, False]
    assert (between.between_ranks, other.between_ranks, mistake.exit_code) == (True, False, 2)
    FAILURES[0].show()
    assert capsys.readouterr().err == "paceline: error: optim.lr = 0: too small\n"


# A launcher that starts a rank whose connection to it breaks, and that itself may end a moment later.
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
from paceline.cli import failure
failure._LAUNCHER_END_S = {wait_s}
print(flush=True)
failure.Failure("the store is gone", 1, consequence=True).report()
"""


@pytest.mark.parametrize(("ends", "wait_s", "shown"), [("killed", 100, True), ("stays", 1, False)])
def test_a_rank_shows_its_failure_where_its_launcher_is_ending(
    ends: str, wait_s: float, shown: bool
) -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK.format(wait_s=wait_s), ends]
    # It returns when the last writer has closed the pipe, so when the rank has ended.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ("paceline: error: the store is gone" in done.stderr) == shown


def reported(line: str, *, consequence: bool = False) -> RankEnd:
    extra = {"trace": "", "exit_code": "1", "consequence": str(int(consequence))}
    return RankEnd(1, {"message": line, "extraInfo": extra})


KILLED, TERMINATED = RankEnd(-signal.SIGKILL), RankEnd(-signal.SIGTERM)
LOST = reported("another rank is gone", consequence=True)


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        # A cause comes before consequences and before ranks without a report.
        ({0: LOST, 2: KILLED, 1: reported("the shard is gone")}, "the shard is gone"),
        ({0: LOST, 1: KILLED}, "rank 1 was ended by SIGKILL"),
        # The supervisor kills ranks that hang in a collective with a dead one; it saw that one first.
        ({3: KILLED, 0: KILLED}, "rank 3 was"),
        ({0: TERMINATED, 1: RankEnd(-11)}, "rank 1 was ended by SIGSEGV"),
        ({1: LOST}, "another rank is gone"),
        ({0: RankEnd(143), 1: KILLED}, "rank 1 was ended by SIGKILL"),
        ({4: RankEnd(7)}, "rank 4 ended with exit code 7"),
        ({4: RankEnd(-40)}, "rank 4 was ended by signal 40"),
    ],
)
def test_the_root_cause(failures: dict[int, RankEnd], line: str) -> None:
    found = root_cause(failures)
    assert isinstance(found, Failure)
    assert found.line.startswith(line)


def test_ranks_that_stopped_on_request_are_no_failure() -> None:
    assert root_cause({0: RankEnd(143), 1: RankEnd(143)}) == 143
    assert root_cause({0: RankEnd(130), 1: TERMINATED}) == 130


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FIND = (
    "import os; from paceline.cli.launcher_watch import find_launcher as find; "
    "found = find(os.environ); print(found.name if found else '-', found.pid if found else 0)"
)
BY_HAND = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}
OURS = {"TORCHELASTIC_RUN_ID": "ours"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here",
}  # fmt: skip
ONE_TASK = SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}  # perhaps an interactive shell


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not is_launchers(name)}


@on_linux
@pytest.mark.parametrize(
    ("variables", "shells", "name"),
    [
        (TORCHRUN, 0, "torchrun"), (TORCHRUN, 2, "torchrun"), (MPI, 0, "openmpi"),
        (SLURM, 2, "slurm"), ({}, 0, "-"), (BY_HAND, 0, "-"),
        (ONE_TASK, 0, "-"), ({"RANK": "not a number", "WORLD_SIZE": "2"}, 0, "-"),
    ],
)  # fmt: skip
def test_the_launcher_is_found_past_shells(
    variables: dict[str, str], shells: int, name: str
) -> None:
    command = [sys.executable, "-c", FIND]
    for _ in range(shells):
        command = ["bash", "-c", '"$@"; true', "bash", *command]
    env = environment() | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name, str(0 if name == "-" else os.getpid())]


@on_linux
def test_a_process_that_ended_is_gone_also_as_a_zombie() -> None:
    child = subprocess.Popen(["sleep", "60"])
    found = find_launcher(OURS | {LAUNCHER_VARIABLE: str(child.pid)})
    assert found.is_gone(), "it lives, but is no ancestor of this process"
    parent = find_launcher(OURS | {LAUNCHER_VARIABLE: str(os.getppid())})
    assert not parent.is_gone()
    assert Launcher("torchrun", os.getppid(), "0").is_gone(), "another process with its id"
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    launcher = Launcher("torchrun", child.pid, stat[19])
    assert not launcher.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert launcher.is_gone(), "a zombie"
    child.wait()
    assert launcher.is_gone()
    assert find_launcher({LAUNCHER_VARIABLE: "1"}) is None, "a shell of a rank is no rank"


@on_linux
@pytest.mark.parametrize("meets", [False, True])
def test_a_rank_whose_launcher_is_gone_ends_with_one_line(meets: bool) -> None:
    """Before the first step there is nothing to save, also while ranks meet."""
    code = (
        "import os, time; from paceline.cli.launcher_watch import LauncherWatch; "
        "from paceline.core.host import DeferredEnd\n"
        f"with DeferredEnd({meets}):\n  LauncherWatch(os.environ); time.sleep(600)"
    )
    gone = subprocess.Popen(["true"])
    gone.wait()
    env = environment() | OURS | {LAUNCHER_VARIABLE: str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("paceline: error: the launcher of this rank (")


# One of two threads reports, slowly, and the other has something to report, too. The main thread may
# then stay in an exit handler, which the watch has to end, or end the process itself.
_BOTH_REPORT = """
import os, sys, threading, time
from paceline.cli import failure, launcher_watch
main_first = sys.argv[1] == "main"
begun = threading.Event()
def show(self):
    begun.set()
    time.sleep(0.5)
    sys.stderr.write(f"{self.line}\\n")
    sys.stderr.flush()
failure.Failure.show = show
launcher_watch.Launcher.is_gone = lambda self: not main_first or begun.is_set()
launcher_watch._POLL_S, launcher_watch._REPORT_S = 0.01, 100
watch = launcher_watch.LauncherWatch(os.environ)
if not main_first:
    begun.wait()
code = failure.Failure("the store is gone", 1).report()
if main_first:
    time.sleep(600)
os._exit(code)
"""


@on_linux
@pytest.mark.parametrize(
    ("first", "expected"), [("main", "the store is gone"), ("watch", "the launcher of this rank (")]
)
def test_main_thread_and_watch_report_once_together(first: str, expected: str) -> None:
    command = [sys.executable, "-c", _BOTH_REPORT, first]
    env = environment() | TORCHRUN
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(expected)
    assert done.returncode == 1


def test_a_failure_that_was_left_to_the_launcher_is_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher may end before it shows it."""
    LauncherWatch({})
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getppid()))
    assert Failure("optim.lr = 0: too small", 2).report() == 2
    monkeypatch.setenv(LAUNCHER_VARIABLE, "0")
    for _ in range(2):
        assert Failure("the launcher is gone", 1).report() == 1
    assert capsys.readouterr().err == "paceline: error: the launcher is gone\n"


@on_linux
@pytest.mark.parametrize("looks", [1, 3])
def test_an_error_between_ranks_is_a_consequence_of_a_launcher_that_is_just_ending(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections break a little before /proc shows it as ended."""
    states = iter([False] * (looks - 1) + [True])
    monkeypatch.setattr(LauncherWatch, "_watch", lambda self: None)
    monkeypatch.setattr(watch, "find_launcher", lambda env: Launcher("torchrun", 7, "1"))
    monkeypatch.setattr(watch, "_LAUNCHER_SEEN_S", 100.0)
    monkeypatch.setattr(Launcher, "is_gone", lambda self: next(states))
    cause = LauncherWatch({}).cause(Failure.of(CommError("rank 1 is gone", "see its log")))
    assert "torchrun, process 7" in cause.line
    assert cause.between_ranks, "our own launcher may still be the parent"


@on_linux
def test_a_mistake_of_the_user_does_not_wait_for_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LauncherWatch, "_watch", lambda self: None)
    monkeypatch.setattr(watch, "find_launcher", lambda env: Launcher("torchrun", 7, "1"))
    monkeypatch.setattr(Launcher, "is_gone", lambda self: False)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: pytest.fail("waits"))
    failure = Failure.of(ConfigError("optim.lr", 0, "too small", "give more"))
    assert LauncherWatch({}).cause(failure) is failure


@on_linux
def test_a_run_that_ends_before_its_watch_looks_names_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other ranks saw it first, and asked this one to save and stop."""
    ended = threading.Event()
    monkeypatch.setattr(Launcher, "is_gone", lambda self: ended.is_set())
    monkeypatch.setattr(LauncherWatch, "_watch", lambda self: None)
    monkeypatch.setattr(watch, "find_launcher", lambda env: Launcher("torchrun", 7, "1"))

    def stopped(standalone_mode: bool) -> int:
        ended.set()
        return 143

    monkeypatch.setattr(command_line, "app", stopped)
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert command_line.run_command() == 143
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "paceline: error: the launcher of this rank (torchrun, process 7) has ended"
    )


@on_linux
@pytest.mark.parametrize("variables", [TORCHRUN, SLURM])
def test_a_launcher_that_proc_hides_is_watched_by_signals(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `hidepid`: the search must end, and the process must not count as gone."""
    monkeypatch.setattr(watch, "process_stat", lambda pid: None)
    found = find_launcher(variables)
    assert found.pid == os.getppid()
    assert not found.is_gone()
    assert find_launcher(OURS | {LAUNCHER_VARIABLE: str(os.getppid())}) is not None
    child = subprocess.Popen(["true"])
    child.wait()
    assert Launcher("slurm", child.pid, "?").is_gone()
