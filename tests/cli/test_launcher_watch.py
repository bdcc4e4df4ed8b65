"""Whom a rank takes for its launcher, and what it does without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import paceline.cli.launcher_watch as module
from cli_runs import is_launchers
from paceline.cli.failure import CHILD_MARK
from paceline.cli.launcher_watch import Launcher, find_launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FIND = (
    "import os; from paceline.cli.launcher_watch import find_launcher as find; "
    "found = find(os.environ); print(found.name if found else '-', found.pid if found else 0)"
)
PLACE = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip
TORCHRUN = PLACE | {"TORCHELASTIC_RUN_ID": "none"}
OURS = {"TORCHELASTIC_RUN_ID": "ours"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here",
}  # fmt: skip


def found_by_a_rank(place: dict[str, str], shells: int = 0) -> tuple[str, int]:
    """What a child of this process finds, through so many shells."""
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)} | place
    command = [sys.executable, "-c", FIND]
    for _ in range(shells):
        command = ["bash", "-c", '"$@"; true', "bash", *command]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    name, pid = done.stdout.split()
    return name, int(pid)


@pytest.mark.parametrize("shells", [0, 2])
@pytest.mark.parametrize(
    ("place", "name"), [(TORCHRUN, "torchrun"), (MPI, "openmpi"), (SLURM, "slurm")]
)
def test_the_launcher_is_found_past_shells(place: dict[str, str], name: str, shells: int) -> None:
    assert found_by_a_rank(place, shells) == (name, os.getpid())


@pytest.mark.parametrize(
    "place",
    [
        {},
        PLACE,  # ranks started by hand
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # perhaps an interactive shell
        {"RANK": "not a number", "WORLD_SIZE": "2"},  # the command itself says what is wrong
    ],
)
def test_who_was_started_by_no_launcher_watches_nobody(place: dict[str, str]) -> None:
    assert found_by_a_rank(place) == ("-", 0)


def test_a_process_that_ended_is_gone_also_as_a_zombie() -> None:
    child = subprocess.Popen(["sleep", "60"])
    found = find_launcher(OURS | {CHILD_MARK: str(child.pid)})
    assert found is not None
    assert found.is_gone(), "it lives, but is no ancestor of this process"
    parent = find_launcher(OURS | {CHILD_MARK: str(os.getppid())})
    assert parent is not None
    assert not parent.is_gone()
    assert Launcher("torchrun", os.getppid(), "0").is_gone(), "another process with its id"
    start = subprocess.run(
        ["cut", "-d)", "-f2-", f"/proc/{child.pid}/stat"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[19]
    launcher = Launcher("torchrun", child.pid, start)
    assert not launcher.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert launcher.is_gone(), "a zombie"
    child.wait()
    assert launcher.is_gone()


def test_a_rank_whose_launcher_is_gone_already_ends_with_one_line() -> None:
    """Before the first step SIGTERM saves nothing, so it is not waited for."""
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    code = (
        "import os, time; from paceline.cli.launcher_watch import LauncherWatch; "
        "LauncherWatch(os.environ); time.sleep(60)"
    )
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | OURS | {CHILD_MARK: str(gone.pid)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("paceline: error: the launcher of this rank (")


@pytest.mark.parametrize("place", [TORCHRUN, SLURM, OURS | {CHILD_MARK: str(os.getppid())}])
def test_a_launcher_that_proc_hides_is_watched_by_signals(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `hidepid`: the search must end, and the process must not count as gone."""
    monkeypatch.setattr(module, "_stat", lambda pid: None)
    found = find_launcher(place)
    if CHILD_MARK in place:  # whether it is an ancestor cannot be told either
        assert found is not None
        return
    assert found is not None
    assert found.pid == os.getppid()
    assert not found.is_gone()
    child = subprocess.Popen(["true"])
    child.wait()
    assert Launcher("slurm", child.pid, "?").is_gone()


def test_a_shell_of_a_rank_is_no_rank() -> None:
    assert find_launcher({CHILD_MARK: "1"}) is None
