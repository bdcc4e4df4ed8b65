"""Ranks do not outlive the launcher that started them; a process that none started lives on."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from cli_runs import steps
from launch.jobs import Job, assert_nothing_left, ranks_of, reached_step, started, training
from ranks import free_port

PACELINE = [sys.executable, "-m", "paceline"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
ENDLESS = ["--epochs", "5000"]


def in_a_shell(folder: Path) -> list[str]:
    """The rank as a child of a shell: `; true` keeps the shell from becoming the rank."""
    command = shlex.join([*PACELINE, *training(folder / "run", *ENDLESS)])
    return ["bash", "-c", f"{command}; true"]


def kill_launcher(job: Job, folder: Path) -> None:
    job.wait_until(reached_step(folder / "run"))
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()


def assert_ended_and_saved(job: Job, folder: Path, ranks: int) -> None:
    assert_nothing_left(folder)
    saved = sorted((folder / "run/checkpoints").glob("step-*.pt"))
    assert int(saved[-1].stem.removeprefix("step-")) >= 15
    lines = [line for line in job.wait().err.splitlines() if line.startswith("paceline: error: ")]
    assert len(lines) == ranks, lines
    assert all("launcher" in line and "--resume auto" in line for line in lines), lines


def test_torchrun_is_killed_past_a_shell(tmp_path: Path) -> None:
    with started([*TORCHRUN, "2", "--no-python", *in_a_shell(tmp_path)], tmp_path) as job:
        kill_launcher(job, tmp_path)
        assert_ended_and_saved(job, tmp_path, 2)


def test_torchrun_is_killed_while_its_ranks_wait_for_another_node(tmp_path: Path) -> None:
    """Nothing is trained yet, and nobody would hear SIGTERM."""
    waits = ["--set", "comm.rendezvous_timeout_s=600"]
    # As on the second node of two, whose first never starts.
    shell = f"WORLD_SIZE=2 {shlex.join([*PACELINE, *training(tmp_path / 'run', *waits)])}; true"
    with started([*TORCHRUN, "1", "--no-python", "bash", "-c", shell], tmp_path) as job:
        job.wait_until(lambda: 0 in ranks_of(tmp_path))
        time.sleep(2)  # on its way to the rendezvous, or in it
        os.kill(job.process.pid, signal.SIGKILL)
        assert_nothing_left(tmp_path)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpirun_is_killed(tmp_path: Path) -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    port = {"MASTER_PORT": str(free_port())}
    with started([*launcher, *in_a_shell(tmp_path)], tmp_path, **port) as job:
        kill_launcher(job, tmp_path)
        assert_nothing_left(tmp_path)
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    assert int(saved[-1].stem.removeprefix("step-")) >= 15


def by_hand(rank: int) -> dict[str, str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    return place | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_without_a_launcher_live_on_without_their_shells(
    tmp_path: Path, ranks: int
) -> None:
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank in range(ranks):
            place = {**by_hand(rank), "MASTER_PORT": port} if ranks > 1 else {}
            jobs.append(stack.enter_context(started(in_a_shell(tmp_path), tmp_path, **place)))
        for job in jobs:
            kill_launcher(job, tmp_path)
        time.sleep(3)  # longer than a rank takes to find out that its launcher is gone
        before, deadline = len(steps(tmp_path / "run")), time.monotonic() + 60
        while len(steps(tmp_path / "run")) < before + 10:
            assert time.monotonic() < deadline, jobs[0].wait().err
            time.sleep(0.05)
