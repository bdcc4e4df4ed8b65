"""Rank 0's output as it comes, and the one exit code of a job.

In: a job under way on a cluster. Out: rank 0's standard output and error on ours; at the end the last
line of each other rank that failed, and the first exit code that is not 0. Where ranks were started
without agents, one that fails takes the others with it after a moment.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

from paceline.bench.cluster.job import ClusterJob, Ended

_POLL_S = 0.05
# Ranks that were left behind find out by themselves, and say so, within this time; or never.
_GRACE_S = 20.0


def show(job: ClusterJob) -> int:
    """Hands on rank 0's output until all have ended; returns the job's exit code."""
    _stream(job)
    return _conclude(job.ended())


def _stream(job: ClusterJob) -> None:
    shown = {"stdout": 0, "stderr": 0}
    failed_at: float | None = None
    while True:
        running = job.running()  # asked first: what came until the end is shown, too
        for stream, target in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            file = job.file(0, stream)
            shown[stream] += _copy(file, shown[stream], target.buffer) if file else 0
        if not running:
            return
        if failed_at is None and any(process.returncode for process in job.processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _GRACE_S:
            job.kill()
        time.sleep(_POLL_S)


def _copy(file: Path, start: int, target: BinaryIO) -> int:
    with file.open("rb") as source:
        source.seek(start)
        data = source.read()
    target.write(data)
    target.flush()
    return len(data)


def _conclude(ended: Ended) -> int:
    """Says which ranks failed, by the last line of each that is not shown already."""
    if ended.ok:
        return 0
    last = [(text.strip().splitlines() or [""])[-1] for text in ended.err]
    # Where all say the same, rank 0 has said it already.
    lines = [f"rank {rank}: {line}\n" for rank, line in enumerate(last) if line and line != last[0]]
    sys.stderr.writelines(lines)
    if lines or not last[0]:
        sys.stderr.write(f"paceline: error: the exit codes are {ended.codes}\n")
    code = next(code for code in ended.codes if code)
    return code if code > 0 else 128 - code
