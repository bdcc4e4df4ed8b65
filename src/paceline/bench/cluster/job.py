"""`ClusterJob`: processes under way on the hosts of a cluster.

In: what a launcher wants started. Out: exit codes and output of every process and every rank. Output goes
into files, so that a rank never waits for somebody to read.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.cluster.launchers import Start
from paceline.bench.cluster.namespace import Namespace
from paceline.core.errors import LaunchError

# In the environment of all that a job starts, to tell it from another job on the same host.
_MARK = "EMULATED_CLUSTER_JOB"
_POLL_S = 0.02
_REAP_LIMIT_S = 2.0


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    `codes` has one for each process that was started: torchrun's agent of each host, or each rank; a
    negative one is the signal that ended it. `out` and `err` are by rank, `process_err` by process.
    """

    codes: list[int]
    out: list[str]
    err: list[str]
    process_err: list[str]

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    def explain(self) -> str:
        """All that was said, for the reader of a failure."""
        parts = [f"exit codes {self.codes}"]
        for rank, (out, err) in enumerate(zip(self.out, self.err, strict=True)):
            parts += [f"-- rank {rank} out:\n{out}", f"-- rank {rank} err:\n{err}"]
        parts += [f"-- process {n}:\n{text}" for n, text in enumerate(self.process_err) if text]
        return "\n".join(parts)


class ClusterJob:
    """Started at once."""

    def __init__(self, starts: Sequence[Start], hosts: Sequence[Namespace], cwd: Path) -> None:
        self._starts = list(starts)
        self._hosts = [hosts[number] for number in sorted({start.host for start in starts})]
        self._cwd = cwd
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._rank_files = [(start.logs, name) for start in starts for name in start.rank_files]
        self.processes: list[subprocess.Popen[bytes]] = []
        for start in starts:
            self._start(start, hosts[start.host])

    def _start(self, start: Start, host: Namespace) -> None:
        start.logs.mkdir(parents=True)
        mark, _, value = self._mark.partition("=")
        with (start.logs / "stdout").open("wb") as out, (start.logs / "stderr").open("wb") as err:
            process = subprocess.Popen(
                host.command(start.command),
                cwd=self._cwd,
                env=start.env | {mark: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # A Ctrl-C is for the cluster's owner, who ends us all.
                start_new_session=True,
            )
        self.processes.append(process)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def file(self, rank: int, stream: str) -> Path | None:
        """Where rank's `stdout` or `stderr` goes; None as long as torchrun has not opened it.

        After a restart by torchrun it is the last attempt's.
        """
        logs, pattern = self._rank_files[rank]
        return max(logs.glob(pattern.format(stream=stream)), default=None)

    def wait(self, timeout_s: float) -> Ended:
        """How all processes ended; where some do not within the time, all are killed."""
        deadline = time.monotonic() + timeout_s
        while self.running():
            if time.monotonic() > deadline:
                late = {
                    start.host
                    for start, process in zip(self._starts, self.processes, strict=True)
                    if process.poll() is None
                }
                raise self._failure(f"still running on hosts {sorted(late)} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return self.ended()

    def wait_until(self, reached: Callable[[], object], timeout_s: float) -> None:
        """Returns once `reached()` is true; an error where the job ends or time runs out first."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if not self.running():
                raise self._failure("the job ended before it came this far")
            if time.monotonic() > deadline:
                raise self._failure(f"the job did not come this far within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def ended(self) -> Ended:
        ranks = range(len(self._rank_files))
        return Ended(
            codes=[process.returncode for process in self.processes],
            out=[_read(self.file(rank, "stdout")) for rank in ranks],
            err=[_read(self.file(rank, "stderr")) for rank in ranks],
            process_err=[_read(start.logs / "stderr") for start in self._starts],
        )

    def kill(self) -> None:
        """Agents and ranks: torchrun gives each rank a session of its own, so they are found by mark."""
        self.kill_started()
        for host in self._hosts:
            host.kill(self._mark)
        self.reap()

    def kill_started(self) -> None:
        """Only what was started here. It may not have entered its host yet, and is not found there."""
        for process in self.processes:
            process.kill()

    def reap(self) -> None:
        """Takes the exit codes of processes that were killed.

        By asking, not by waiting: it may run in a signal's handler, above a wait for the same process.
        """
        deadline = time.monotonic() + _REAP_LIMIT_S
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _failure(self, cause: str) -> LaunchError:
        """Ends all; the line says why, and a note beneath a traceback what everybody said."""
        self.kill()
        error = LaunchError(cause)
        error.add_note(self.ended().explain())
        return error


def _read(file: Path | None) -> str:
    return file.read_text(errors="replace") if file and file.exists() else ""
