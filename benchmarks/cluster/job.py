"""`ClusterJob`: processes on the hosts of an emulated cluster, their output and exit codes.

`torchrun_starts` starts real torchrun agents with a rendezvous over the network; `plain_starts`
starts each rank directly, which is seconds faster. Output goes to files, so that a rank never blocks
on a full pipe.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from benchmarks.cluster.network import INTERFACE, Namespace, host_address
from paceline.core.errors import LaunchError

_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PRTE_", "TORCHELASTIC_", "PACELINE_", "PET_")
_FOREIGN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip
# Environment variable that identifies the processes of a job.
_MARK = "EMULATED_CLUSTER_JOB"
_POLL_S = 0.02
_REAP_LIMIT_S = 2.0
# Time in which the other ranks may notice a failed one by themselves before they are killed.
_GRACE_S = 20.0


@dataclass(frozen=True)
class Start:
    """One process to start. `logs` is the folder of its output; `rank_files` has a file pattern in it
    for each rank of the process, with `{stream}` for stdout or stderr."""

    host: int
    command: list[str]
    env: dict[str, str]
    logs: Path
    rank_files: tuple[str, ...]


def host_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process on a host: ours without variables of launchers."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }
    # Without it Gloo would resolve the host's own name.
    env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    # All hosts share this machine's cores.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | dict(extra)


def as_program(command: Sequence[str]) -> list[str]:
    """A script or `-m MODULE` runs in this Python; anything else is a program."""
    if command and (command[0] == "-m" or command[0].endswith(".py")):
        return [sys.executable, *command]
    return list(command)


def torchrun_starts(
    command: Sequence[str], ranks: Sequence[int], port: int, env: Mapping[str, str], logs: Path
) -> list[Start]:
    """One agent per host; the first host's runs the store."""
    starts = []
    for host, count in enumerate(ranks):
        own = logs / f"host{host}"
        options = {
            "--nnodes": len(ranks), "--node-rank": host, "--nproc-per-node": count,
            "--master-addr": host_address(0), "--master-port": port,
            "--local-addr": host_address(host), "--redirects": 3, "--log-dir": own / "ranks",
        }  # fmt: skip
        flags = [str(part) for option in options.items() for part in option]
        agent = [sys.executable, "-m", "torch.distributed.run", *flags, "--no-python"]
        files = tuple(f"ranks/*/attempt_*/{n}/{{stream}}.log" for n in range(count))
        program = [*agent, *as_program(command)]
        starts.append(Start(host, program, host_environment(env), own, files))
    return starts


def plain_starts(
    command: Sequence[str], ranks: Sequence[int], port: int, env: Mapping[str, str], logs: Path
) -> list[Start]:
    """One process per rank, with its rank in the environment."""
    starts: list[Start] = []
    for host, count in enumerate(ranks):
        for local_rank in range(count):
            place = {
                "RANK": len(starts), "WORLD_SIZE": sum(ranks), "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": count, "GROUP_RANK": host,
                "MASTER_ADDR": host_address(0), "MASTER_PORT": port,
            }  # fmt: skip
            own = host_environment({name: str(value) for name, value in place.items()} | dict(env))
            folder = logs / f"rank{len(starts)}"
            starts.append(Start(host, as_program(command), own, folder, ("{stream}",)))
    return starts


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    `codes` has the exit code of each started process, a torchrun agent per host or a rank; negative
    ones are signals. `out` and `err` are by rank, `process_err` by process.
    """

    codes: list[int]
    out: list[str]
    err: list[str]
    process_err: list[str]

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    def explain(self) -> str:
        """All output, to explain a failure."""
        parts = [f"exit codes {self.codes}"]
        for rank, (out, err) in enumerate(zip(self.out, self.err, strict=True)):
            parts += [f"-- rank {rank} out:\n{out}", f"-- rank {rank} err:\n{err}"]
        parts += [f"-- process {n}:\n{text}" for n, text in enumerate(self.process_err) if text]
        return "\n".join(parts)


class ClusterJob:
    """Starts all processes immediately."""

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
                # Ctrl-C is handled by the cluster's owner.
                start_new_session=True,
            )
        self.processes.append(process)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def file(self, rank: int, stream: str) -> Path | None:
        """The file of a rank's `stdout` or `stderr`, after a torchrun restart that of the last
        attempt; None until torchrun has opened it."""
        logs, pattern = self._rank_files[rank]
        return max(logs.glob(pattern.format(stream=stream)), default=None)

    def wait(self, timeout_s: float) -> Ended:
        """Waits for all processes; kills all and raises LaunchError after `timeout_s`."""
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
        """Returns once `reached()` is true; raises LaunchError if the job ends or time runs out
        first."""
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
        """Kills agents and ranks. torchrun gives each rank its own session, so they are found by
        mark."""
        self.kill_started()
        for host in self._hosts:
            host.kill(self._mark)
        self.reap()

    def kill_started(self) -> None:
        """Kills the started processes, which may not have entered their namespace yet."""
        for process in self.processes:
            process.kill()

    def reap(self) -> None:
        """Collects exit codes of killed processes. Polls instead of waiting, because it may run in a
        signal handler that interrupted a wait for the same process."""
        deadline = time.monotonic() + _REAP_LIMIT_S
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _failure(self, cause: str) -> LaunchError:
        """Kills all processes; the error has all output as a note below the traceback."""
        self.kill()
        error = LaunchError(cause)
        error.add_note(self.ended().explain())
        return error


def _read(file: Path | None) -> str:
    return file.read_text(errors="replace") if file and file.exists() else ""


def show(job: ClusterJob) -> int:
    """Shows rank 0's output until all processes have ended; returns the first exit code that is not 0.

    When a rank fails that has no agent, the others are killed after a grace period.
    """
    _stream(job)
    return _conclude(job.ended())


def _stream(job: ClusterJob) -> None:
    shown = {"stdout": 0, "stderr": 0}
    failed_at: float | None = None
    while True:
        running = job.running()  # checked first, so that all output until the end is shown
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
    """Prints the last line of each failed rank that differs from rank 0's, and the exit codes."""
    if ended.ok:
        return 0
    last = [(text.strip().splitlines() or [""])[-1] for text in ended.err]
    lines = [f"rank {rank}: {line}\n" for rank, line in enumerate(last) if line and line != last[0]]
    sys.stderr.writelines(lines)
    if lines or not last[0]:
        sys.stderr.write(f"paceline: error: the exit codes are {ended.codes}\n")
    code = next(code for code in ended.codes if code)
    return code if code > 0 else 128 - code
