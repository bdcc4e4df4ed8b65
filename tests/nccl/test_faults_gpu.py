"""Faults on one of several NCCL ranks: the others end in time with one line that says why."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.one_gpu import SharedGpuJob, restart_mps
from nccl.jobs import ROOT, check_ended, error_lines, finished, needs_gpu, start, torchrun, train

pytestmark = [*needs_gpu, pytest.mark.timeout(180)]
FAULTY = str(ROOT / "tests" / "nccl" / "faulty.py")
TIMEOUT_S = 10.0
# Beyond comm.timeout_s: heartbeats, the abort of the communicators, and the end of the process.
GRACE_S = 20.0


@pytest.fixture(autouse=True)
def fresh_mps() -> None:
    """A client that died in a collective can leave the MPS server unusable."""
    restart_mps()


def faulted(fault: str, rank: int, run: Path, logs: Path) -> SharedGpuJob:
    """Runs with the fault; every other rank is gone within the stated time after the faulty one."""
    words = train(run, "--epochs", "3", "--set", f"comm.timeout_s={TIMEOUT_S:g}")[2:]
    job = start((2,), [FAULTY, fault, str(rank), *words], logs)
    culprit = job.processes[rank]
    try:
        if fault == "stop":
            _wait_for_stop(culprit.pid)
            others = [process for process in job.processes if process is not culprit]
            deadline = time.monotonic() + TIMEOUT_S + GRACE_S
            while any(p.poll() is None for p in others) and time.monotonic() < deadline:
                time.sleep(0.1)
            culprit.kill()
            culprit.wait(10)
        else:
            culprit.wait(90)
        job.wait(0.5 if fault == "stop" else TIMEOUT_S + GRACE_S)
    finally:
        job.kill()
    if fault not in ("exception", "illegal"):
        assert culprit.returncode == -signal.SIGKILL, f"no fault happened: {job.log(rank)[-3000:]}"
    return job


def _wait_for_stop(process: int, limit_s: float = 90) -> None:
    """Until the process has stopped itself (state T)."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} has not stopped")


def check_survivors(job: SharedGpuJob, rank: int, *words: str) -> None:
    check_ended(job)
    for other in range(job.size):
        if other == rank:
            continue
        lines = error_lines(job, other)
        assert len(lines) == 1, f"rank {other}: {lines}\n{job.log(other)[-3000:]}"
        assert any(word in lines[0] for word in words), lines[0]
        assert "Traceback" not in job.log(other), job.log(other)[-3000:]
        assert job.processes[other].returncode > 0


@pytest.mark.parametrize("fault", ["forward", "collective", "graph", "evaluation"])
def test_a_killed_rank_is_named_and_the_run_resumes(fault: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = faulted(fault, 1, run, tmp_path / "logs")
    check_survivors(job, 1, "rank 1")
    if fault == "graph":
        restart_mps()
        words = train(run, "--epochs", "3", "--resume", "auto")
        finished((2,), words, tmp_path / "again")
        assert json.loads((run / "summary.json").read_text())["stopped_by"] == "finished"


def test_rank_0_killed_in_a_save_takes_the_store_with_it(tmp_path: Path) -> None:
    job = faulted("save", 0, tmp_path / "run", tmp_path / "logs")
    check_survivors(job, 0, "rank 0")


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    job = faulted("stop", 1, tmp_path / "run", tmp_path / "logs")
    check_survivors(job, 1, "rank 1")


def test_an_exception_on_one_rank_is_everybody_s_line(tmp_path: Path) -> None:
    job = faulted("exception", 1, tmp_path / "run", tmp_path / "logs")
    check_survivors(job, 1, "rank 1: KeyError")


def test_an_illegal_memory_access_ends_all_ranks_with_a_line_each(tmp_path: Path) -> None:
    """Under MPS the fault hits every client of the GPU."""
    job = faulted("illegal", 1, tmp_path / "run", tmp_path / "logs")
    for rank in range(2):
        assert len(error_lines(job, rank)) == 1, job.log(rank)[-3000:]
        assert "Traceback" not in job.log(rank), job.log(rank)[-3000:]
        assert job.processes[rank].returncode > 0
    check_ended(job)


def test_torchrun_restarts_after_a_kill(tmp_path: Path) -> None:
    words = train(
        tmp_path / "run", "--epochs", "3", "--resume", "auto", "--set", "comm.timeout_s=10", "--set",
        "checkpoint.interval_steps=20",
    )[2:]  # fmt: skip
    job = torchrun(2, [FAULTY, "forward", "1", *words], "--max-restarts", "1")
    try:
        output, _ = job.communicate(timeout=150)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    (tmp_path / "output.log").write_text(output)
    assert job.returncode == 0, output[-3000:]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["stopped_by"] == "finished"
    assert len(found["resumed_at_steps"]) == 1
