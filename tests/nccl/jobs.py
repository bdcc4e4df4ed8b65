"""Jobs of NCCL ranks that share one GPU, for the GPU tests, and what every such job must leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.one_gpu import SharedGpuJob, start_mps, start_ranks, why_unavailable

ROOT = Path(__file__).parent.parent.parent
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_unavailable()), reason=f"NCCL on one GPU: {why_unavailable()}"),
]
SHARED = ("--set", "comm.share_gpus=true")
# Whatever a library prints on its own when something went wrong, though the exit code may be 0.
_NOISE = re.compile(
    r"Traceback|Error:|\[E\d|Exception raised|was not called before program exit|Fatal Python|"
    r"core dumped|UserWarning|FutureWarning"
)
ERROR = "paceline: error: "


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def start(nodes: Sequence[int], command: Sequence[str], logs: Path) -> SharedGpuJob:
    start_mps()
    return start_ranks(nodes, command, logs, environment=environment())


def finished(nodes: Sequence[int], command: Sequence[str], logs: Path, limit_s: float = 90) -> str:
    """Runs to a clean end on every rank; rank 0's output."""
    job = start(nodes, command, logs)
    codes = job.wait(limit_s)
    assert codes == [0] * job.size, _logs(job)
    check_quiet(job)
    return job.log(0)


def check_quiet(job: SharedGpuJob) -> None:
    """No library complained, and no process of the job is left."""
    for rank in range(job.size):
        found = _NOISE.search(job.log(rank))
        assert not found, (
            f"rank {rank} printed {found and found.group()!r}: {job.log(rank)[-3000:]}"
        )
    check_ended(job)


def check_ended(job: SharedGpuJob) -> None:
    """After `wait`: every rank had ended by itself, and left no process behind."""
    assert not job.late, f"ranks {job.late} did not end: {_logs(job)}"
    assert not job.orphans, f"processes of sessions {job.orphans} are left"


def train(output: Path, *arguments: str) -> list[str]:
    """The embedded images and the small net: a second or two an epoch. Several buckets, so that the
    exchange overlaps and the CUDA graph of a step holds collectives."""
    buckets = ("--set", "comm.fusion_mib=0.05")
    return ["-m", "paceline", "train", *SHARED, *buckets, "--output", str(output), *arguments]


def wait_for_steps(job: SharedGpuJob, metrics: Path, steps: int, limit_s: float = 60) -> None:
    """Until rank 0 has recorded so many steps."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"event": "step"') >= steps:
            return
        assert all(process.poll() is None for process in job.processes), _logs(job)
        time.sleep(0.02)
    job.kill()
    raise AssertionError(f"no {steps} steps in {limit_s:g} s: {_logs(job)}")


def error_lines(job: SharedGpuJob, rank: int) -> list[str]:
    return [line for line in job.log(rank).splitlines() if line.startswith(ERROR)]


def _logs(job: SharedGpuJob) -> str:
    return "\n".join(f"--- rank {rank}\n{job.log(rank)[-3000:]}" for rank in range(job.size))


def torchrun(ranks: int, command: Sequence[str], *flags: str) -> subprocess.Popen[str]:
    """Under torch's own launcher, through the wrapper that gives each rank a host id."""
    start_mps()
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), *flags, "--no-python", sys.executable, "-m", "benchmarks.one_gpu",
        "--wrap", "--", *command,
    ]  # fmt: skip
    return subprocess.Popen(
        words, env={**os.environ, **environment()}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
