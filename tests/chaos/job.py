"""A job of one or several ranks that a trial starts, disturbs, and waits for.

In: a folder, a number of ranks, and who starts them: nobody (one process), a hand (ranks with their place
in the environment) or the launcher of `--nproc-per-node`. Out: processes by name, exit codes, output, and
the time until all of them are gone. Every process below the trial's own counts, so no orphan escapes:
one whose parent ends becomes a child of the trial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli_runs import is_launchers
from fork_server import NAME, STACKS_SIGNAL, ForkServer, Request
from ranks import free_port

TIMEOUT_S, RENDEZVOUS_TIMEOUT_S = 20.0, 10.0
# All ranks end within one of the two time-outs and 10 s, or 30 s after the launcher
# (docs/checkpoints.md, docs/distributed.md); a loaded host may take a few seconds more.
GONE_S = 40.0
INTERVAL_STEPS = 3
IMAGES = [
    "--set", "data.source=synthetic", "--set", "data.synthetic_samples=100",
    "--set", "data.synthetic_classes=4", "--set", "data.image_size=16", "--set", "data.channels=1",
    "--set", "data.mean=[0.5]", "--set", "data.std=[0.25]", "--set", "data.eval_resize=0",
    "--set", "data.augment=pad_crop", "--set", "data.crop_padding=2", "--workers", "1",
]  # fmt: skip
TRAINING = [
    "--model", "resnet_tiny", "--device", "cpu", "--set", "run.threads=1", "--epochs", "3",
    "--global-batch-size", "16", "--lr", "0.05", "--warmup-epochs", "0.5",
    "--set", f"checkpoint.interval_steps={INTERVAL_STEPS}",
    "--set", f"comm.rendezvous_timeout_s={RENDEZVOUS_TIMEOUT_S:g}", "--resume", "auto",
]  # fmt: skip
# Ways to exchange gradients: the backend's own, and messages on a thread, several buffers a step.
EXCHANGES: dict[str, list[str]] = {
    "native": [],
    "hybrid": ["--set", "comm.algorithm=hybrid", "--set", "comm.hybrid.sizes=64",
               "--set", "comm.fusion_mib=0.25"],
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a trial's ranks are started; the reference run is one for each."""

    ranks: int
    starter: str
    exchange: str = "native"

    def arguments(self, output: str, *more: str) -> list[str]:
        own = ["-b", str(16 // self.ranks), "--output", output]
        if self.starter == "launcher":
            own += ["--nproc-per-node", str(self.ranks)]
        if not any(argument.startswith("comm.timeout_s") for argument in more):
            more = (*more, "--set", f"comm.timeout_s={TIMEOUT_S:g}")
        return ["train", *IMAGES, *TRAINING, *EXCHANGES[self.exchange], *own, *more]

    def __str__(self) -> str:
        return f"{self.ranks} {self.starter} {self.exchange}"


@dataclass(frozen=True)
class Place:
    """Where the ranks of a job meet, and on which hosts they run."""

    port: int
    address: str = "127.0.0.1"
    namespaces: tuple[str, ...] = ()

    def of_rank(self, rank: int, ranks: int) -> tuple[dict[str, str], str]:
        """The environment of a rank, and the namespace of its host."""
        hosts = max(1, len(self.namespaces))
        local = ranks // hosts
        env = {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local, "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
            "GLOO_SOCKET_IFNAME": "eth0" if self.namespaces else "lo",
        }  # fmt: skip
        found = self.namespaces[rank // local] if self.namespaces else ""
        return {name: str(value) for name, value in env.items()}, found


class Job:
    """Processes under way. `codes` has the exit code of each that this process is the parent of."""

    def __init__(self, server: ForkServer, way: Way, arguments: Sequence[str], cwd: Path, log: Path,
                 place: Place | None = None, prefix: str = "", **more: object) -> None:  # fmt: skip
        self._server = server
        self.log = log
        self.codes: dict[str, int] = {}
        self._pids: dict[int, str] = {}
        base = {name: value for name, value in os.environ.items() if not is_launchers(name)}
        base |= {"OMP_NUM_THREADS": "1", "PACELINE_JOB_ID": log.name, "COLUMNS": "120"}
        place = place or Place(free_port())
        for rank in range(way.ranks if way.starter == "hand" else 1):
            name, own, namespace = f"{prefix}rank{rank}", {}, ""
            if way.starter == "hand":
                own, namespace = place.of_rank(rank, way.ranks)
            elif way.starter == "launcher":
                name = f"{prefix}launcher"
                del base["PACELINE_JOB_ID"]
            files = {"cwd": str(cwd), "out": f"{log}-{name}.out", "err": f"{log}-{name}.err"}
            request = Request(
                name, list(arguments), base | own, namespace=namespace,
                launches=way.starter == "launcher", **(files | more),  # type: ignore[arg-type]
            )  # fmt: skip
            self._pids[server.start(request)] = name

    def processes(self) -> dict[int, str]:
        """Ids and names of the processes that live, those that others of them have started included."""
        found = {pid: name for pid, (name, _) in descendants(self._server.pid).items()}
        # Not a launcher's fork server, nor what it has not named yet.
        return {pid: self._pids.get(pid, name) for pid, name in found.items() if name != NAME}

    def named(self, name: str) -> list[int]:
        return [pid for pid, known in self.processes().items() if known == name]

    def wait(self, seconds: float, until: Callable[[], object] = lambda: False) -> float | None:
        """Waits until all are gone, or `until()`; returns how long that took, None at the end of time."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            # A look at all processes is dear: not before those that this one started have ended.
            if (self._started_have_ended() and not self._left() and self._reap()) or until():
                return time.monotonic() - started
            time.sleep(0.01)
        return None

    def _left(self) -> bool:
        return bool(descendants(self._server.pid))

    def _started_have_ended(self) -> bool:
        for pid, name in self._pids.items():
            if name not in self.codes:
                with contextlib.suppress(ChildProcessError):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if not found:
                        return False
                    self.codes[name] = os.waitstatus_to_exitcode(status)
        return True

    def _reap(self) -> bool:
        """Takes the exit codes of ended children, also of those that became ours when their parent
        ended. False where one has ended whose threads have not."""
        all_gone = True
        for pid, (name, state) in descendants(self._server.pid, ended=True).items():
            if state in "ZX":
                with contextlib.suppress(ChildProcessError):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    all_gone &= found != 0
                    if found and name != NAME:
                        self.codes[self._pids.get(pid, name)] = os.waitstatus_to_exitcode(status)
        return all_gone

    def kill(self) -> None:
        """Ends what is left, after a look at where it is."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, STACKS_SIGNAL)
        time.sleep(0.5)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(10)

    def output(self) -> dict[str, str]:
        """What each log file of this job holds, by its name."""
        return {
            path.name.removeprefix(f"{self.log.name}-"): path.read_text(errors="replace")
            for path in sorted(self.log.parent.glob(f"{self.log.name}-*"))
            if path.is_file()
        }


def descendants(server: int, *, ended: bool = False) -> dict[int, tuple[str, str]]:
    """Name and state of all processes below this one, but `server`; of those that have `ended` only the
    children of this one, whose exit codes are ours to take."""
    found: dict[int, tuple[str, str, int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                head, _, rest = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
                fields = rest.split()
                found[int(entry)] = (head.partition("(")[2], fields[0], int(fields[1]))
    here, below = os.getpid(), {}
    for pid, (name, state, parent) in found.items():
        if ended:
            if parent == here and pid != server:
                below[pid] = (name, state)
            continue
        if state in "ZX" or pid == server:
            continue
        while parent in found and parent != here:
            parent = found[parent][2]
        if parent == here:
            below[pid] = (name, state)
    return below


@dataclass
class Stopwatch:
    """Seconds since it was made."""

    started: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        return time.monotonic() - self.started
