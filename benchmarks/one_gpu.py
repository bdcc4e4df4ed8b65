"""Several NCCL ranks on one GPU, for tests and benchmarks of multi-GPU code.

    python -m benchmarks.one_gpu --ranks 2 -- -m paceline train --set comm.share_gpus=true …
    python -m benchmarks.one_gpu --ranks 3,1 -- script.py              # two nodes, 3 + 1 ranks
    torchrun --nproc-per-node 2 --no-python python -m benchmarks.one_gpu --wrap -- \\
        -m paceline train --set comm.share_gpus=true …                     # under torchrun

The first two start the ranks with torchrun's environment variables and one log file per rank; after a
time-out the log has the Python stack of every thread. `--wrap` runs inside a rank of another
launcher: it sets what NCCL needs and replaces itself by COMMAND; after torchrun has restarted the ranks,
the first one restarts MPS.

NCCL refuses two ranks of one host on one GPU, so each rank gets its own host id (NCCL_HOSTID) and
communicates through sockets on the loopback interface. NVIDIA MPS runs the kernels of several ranks
at the same time; without it the first collective never ends. MPS has about a hundred connections for
all clients of a GPU, so each rank uses few. The speed of these sockets does not predict that of
NVLink or InfiniBand.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster.job import as_program
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.host import process_ids, process_stat, started_with

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_CONNECTIONS = "4"
_STACKS_S = 3.0


def why_unavailable() -> str:
    """Why this machine cannot run ranks that share a GPU; empty if it can."""
    if shutil.which(_CONTROL) is None:
        return f"{_CONTROL} is not on the PATH"
    import torch

    # Does not initialize CUDA in this process, whose children choose their own connections.
    return "" if torch.cuda.device_count() else "there is no CUDA device"


def start_mps() -> None:
    """Starts this user's MPS daemon, at the place named in the environment if there is one, unless it
    runs already. Children of this process use it."""
    place = Path(tempfile.gettempdir()) / f"paceline-mps-{os.getuid()}"
    os.environ.setdefault(_PIPES, str(place / "pipes"))
    os.environ.setdefault(_LOGS, str(place / "logs"))
    for name in (_PIPES, _LOGS):
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    subprocess.run([_CONTROL, "-d"], capture_output=True, timeout=30, check=False)


def restart_mps() -> None:
    """Restarts MPS: a client that was killed inside a collective can leave the server unusable."""
    start_mps()
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([_CONTROL], input=b"quit\n", capture_output=True, timeout=3, check=False)
    for process in _mps_processes(os.environ[_PIPES]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    time.sleep(0.5)
    start_mps()


def restart_mps_once(attempt: str) -> None:
    """`restart_mps`, by the first of this user's ranks that calls it for this attempt of a job; the
    others wait for it."""
    start_mps()
    with (Path(os.environ[_PIPES]).parent / "attempt").open("a+", encoding="utf-8") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        if last.read() != attempt:
            restart_mps()
            last.truncate(0)
            last.write(attempt)


def _mps_processes(pipes: str) -> list[int]:
    """Daemon and servers that use these pipes."""
    found = []
    for pid in process_ids():
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text()
            if name.startswith("nvidia-cuda-mps") and started_with(pid, _PIPES, pipes):
                found.append(pid)
    return found


def rank_environment(rank: int) -> dict[str, str]:
    """Environment of NCCL and CUDA for a rank that shares its GPU."""
    return {
        "NCCL_HOSTID": f"{socket.gethostname()}-rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS),
    }


@dataclass
class SharedGpuJob:
    """Ranks of one job. `nodes` has the number of ranks of each node, such as (3, 1). After `wait`,
    `late` lists ranks that had to be killed, and `orphans` sessions of ended ranks that still had
    processes."""

    nodes: Sequence[int]
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(self.nodes)

    def log(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")

    def wait(self, limit_s: float) -> list[int]:
        """All exit codes; ranks that take longer than `limit_s` print their stacks and are killed."""
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        self.late += late
        ended = [process.pid for process in self.processes if process.poll() is not None]
        self.orphans += [session for session in ended if session_alive(session)]
        for rank in late:
            self.processes[rank].send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        if late:
            time.sleep(_STACKS_S)
        self.kill()
        return [process.wait() for process in self.processes]

    def kill(self) -> None:
        """Kills all remaining processes of every rank's session."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def session_alive(session: int) -> bool:
    """Returns True if a process of this session runs, such as a child of an ended rank."""
    found = map(process_stat, process_ids())
    return any(stat and stat.session == session and not stat.has_ended for stat in found)


def start_ranks(
    nodes: Sequence[int],
    command: Sequence[str],
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> SharedGpuJob:
    """Starts `command` on every rank; MPS must be running."""
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = SharedGpuJob(tuple(nodes), logs)
    try:
        for node, count in enumerate(nodes):
            for local in range(count):
                rank = len(job.processes)
                own = {
                    "RANK": rank, "WORLD_SIZE": job.size, "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port, "PYTHONFAULTHANDLER": 1,
                }  # fmt: skip
                values = {name: str(value) for name, value in own.items()}
                with (logs / f"rank{rank}.log").open("wb") as output:
                    job.processes.append(
                        subprocess.Popen(
                            as_program(command),
                            env={**os.environ, **rank_environment(rank), **values}
                            | dict(environment or {}),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
    except BaseException:
        job.kill()
        raise
    return job


def main() -> int:
    options = _parser().parse_args()
    try:
        return _wrap(options.command) if options.wrap else _run(options)
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_gpu",
        description="Runs COMMAND on several NCCL ranks that share one GPU under NVIDIA MPS.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", default="2", help="of each node: 2, or 1,1, or 3,1 (default: 2)")
    parser.add_argument("--logs", type=Path, help="folder for rank0.log … (default: a new one)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="kill ranks after this long")
    parser.add_argument("--restart-mps", action="store_true", help="start from a fresh MPS server")
    parser.add_argument("--wrap", action="store_true", help="this process is a rank already")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --, with arguments")
    return parser


def _wrap(command: Sequence[str]) -> int:
    if "RANK" not in os.environ:
        raise LaunchError("--wrap: RANK is not set", "use it under torchrun, or use --ranks")
    for name, value in rank_environment(int(os.environ["RANK"])).items():
        os.environ.setdefault(name, value)
    job, restarts = (
        os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")
    )
    if restarts in ("", "0"):
        start_mps()
    else:  # a rank was killed, and with it perhaps the server
        restart_mps_once(f"{job} {restarts}")
    program = as_program(command)
    os.execvp(program[0], program)


def _run(options: argparse.Namespace) -> int:
    problem = why_unavailable()
    if problem:
        raise LaunchError(f"ranks cannot share a GPU here: {problem}")
    nodes = _nodes(options.ranks)
    if options.restart_mps:
        restart_mps()
    start_mps()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="paceline-one-gpu-"))
    job = start_ranks(nodes, options.command, logs)
    try:
        codes = job.wait(options.limit_s)
    finally:
        job.kill()
    sys.stdout.write(job.log(0))
    sys.stdout.write(f"exit codes {codes}; logs in {logs}\n")
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _nodes(text: str) -> list[int]:
    try:
        nodes = [int(part) for part in text.split(",")]
    except ValueError:
        nodes = []
    if not nodes or min(nodes) < 1:
        raise ConfigError("--ranks", text, "is not a list of numbers", "write 2, or 3,1")
    return nodes


if __name__ == "__main__":
    sys.exit(main())
