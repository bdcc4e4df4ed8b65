"""Ranks do not outlive the launcher that started them, whoever it is."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from launch.jobs import Job, assert_nothing_left, reached_step, started, training
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


def assert_ended_and_saved(folder: Path) -> None:
    assert_nothing_left(folder)
    saved = sorted((folder / "run/checkpoints").glob("step-*.pt"))
    assert int(saved[-1].stem.removeprefix("step-")) >= 15


def test_torchrun_is_killed_past_a_shell(tmp_path: Path) -> None:
    with started([*TORCHRUN, "2", "--no-python", *in_a_shell(tmp_path)], tmp_path) as job:
        kill_launcher(job, tmp_path)
        assert_ended_and_saved(tmp_path)
    lines = [line for line in job.wait().err.splitlines() if line.startswith("paceline: error: ")]
    assert len(lines) == 2, lines
    assert all("launcher" in line and "--resume auto" in line for line in lines), lines


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpirun_is_killed(tmp_path: Path) -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    port = {"MASTER_PORT": str(free_port())}
    with started([*launcher, *in_a_shell(tmp_path)], tmp_path, **port) as job:
        kill_launcher(job, tmp_path)
        assert_ended_and_saved(tmp_path)
