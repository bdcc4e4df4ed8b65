"""What happens to a job: kills, signals, full and read-only disks, cut links and the like.

In: a job, and the trial's random numbers. Out: the job disturbed, and what may follow from it: which
processes were killed, which signals sent, how many steps may be lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cluster import EmulatedCluster, why_unavailable
from chaos.job import INTERVAL_STEPS, Job, Place, Way
from fork_server import ForkServer
from ranks import free_port

# Of 100 disturbances of several ranks. Some are left out where they do not apply.
WEIGHTS = {
    "kill rank": 44, "kill launcher": 16, "kill all": 10, "kill two": 12,
    "SIGTERM": 2, "SIGINT": 2, "SIGHUP": 2, "SIGUSR1": 2, "SIGUSR2": 2,
    "full disk": 2, "read-only": 2, "suspended": 1, "second job": 2, "same port": 1,
    "broken pipe": 2, "cut link": 1,
}  # fmt: skip
TMPFS_MIB = 48


class Disturbance:
    """The base of all kinds; `strike` comes once, at the chosen moment."""

    # Whether the job goes on to its end by itself.
    goes_on = False
    # A kill may interrupt the write of the last save; the one before it is complete, because a save waits
    # for its predecessor.
    lost_steps = 2 * INTERVAL_STEPS
    # Whether it came before the job's end.
    struck = False

    def __init__(self, kind: str, draw: random.Random, way: Way, folder: Path) -> None:
        self.kind, self.draw, self.way, self.folder = kind, draw, way, folder
        self.killed: list[str] = []
        self.sent: list[signal.Signals] = []
        self.detail: dict[str, Any] = {}
        # Before the job starts: its arguments, request and place.
        self.more: tuple[str, ...] = ()
        self.request: dict[str, Any] = {}
        self.place: Place | None = None

    def set_up(self) -> None:
        """Before the job starts."""

    def strike(self, job: Job, server: ForkServer) -> None:
        raise NotImplementedError

    def clean_up(self) -> None:
        """After all processes are gone."""


class Kill(Disturbance):
    """SIGKILL, to a rank, the launcher, two of them a moment apart, or everybody."""

    def strike(self, job: Job, server: ForkServer) -> None:
        living = sorted((name, pid) for pid, name in job.processes().items())
        ranks = [item for item in living if item[0] != "launcher"]
        if self.kind == "kill all":
            self.draw.shuffle(living)
            chosen = living
        elif self.kind == "kill launcher":
            chosen = [item for item in living if item[0] == "launcher"]
        elif self.kind == "kill two":
            chosen = self.draw.sample(living, min(2, len(living)))
        else:
            chosen = [self.draw.choice(ranks)] if ranks else []
        pause = self.draw.choice((0.0, 0.1, 0.4, 1.0)) * self.draw.random()
        for number, (name, pid) in enumerate(chosen):
            if number and self.kind == "kill two":
                time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(name)


class Signal(Disturbance):
    """A signal that asks to stop or to save, to one process; sometimes the same to all."""

    def strike(self, job: Job, server: ForkServer) -> None:
        number = signal.Signals[self.kind]
        self.goes_on = number is signal.SIGUSR1
        living = sorted((name, pid) for pid, name in job.processes().items())
        everybody = self.draw.random() < 0.15
        chosen = living if everybody or not living else [self.draw.choice(living)]
        self.detail["to"] = [name for name, _ in chosen]
        for _, pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.sent.append(number)


class FullDisk(Disturbance):
    """The disk of the run folder, a tmpfs, is filled by another process."""

    # A save fails while steps go on, and the step after it tells all ranks.
    lost_steps = 2 * INTERVAL_STEPS + 1

    def strike(self, job: Job, server: ForkServer) -> None:
        filler, block = self.folder / "filler", 1 << 20
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
        while block >= 1:
            try:
                if os.write(descriptor, bytes(block)) < block:
                    block //= 4
            except OSError:
                block //= 4
        os.close(descriptor)

    def clean_up(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)


class ReadOnly(Disturbance):
    """Nothing can be made or renamed in the run folder any more."""

    lost_steps = 2 * INTERVAL_STEPS + 1

    def set_up(self) -> None:
        self.request = {"obeys_permissions": True}

    def _folders(self) -> list[Path]:
        run = self.folder / "run"
        return [path for path in (self.folder, run, run / "checkpoints") if path.is_dir()]

    def strike(self, job: Job, server: ForkServer) -> None:
        for folder in self._folders():
            folder.chmod(0o555)

    def clean_up(self) -> None:
        for folder in self._folders():
            folder.chmod(0o755)


class Suspended(Disturbance):
    """All processes are stopped for a while, sometimes longer than the time-out."""

    goes_on = True

    def set_up(self) -> None:
        self._pause_s = self.draw.choice((0.3, 1.0, 8.0))
        self.more = ("--set", "comm.timeout_s=6")
        self.detail["pause_s"] = self._pause_s

    def strike(self, job: Job, server: ForkServer) -> None:
        living = list(job.processes())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number is signal.SIGSTOP:
                time.sleep(self._pause_s)


class SecondJob(Disturbance):
    """Another job starts in the same folder, or at the same port in another folder."""

    goes_on = True

    def set_up(self) -> None:
        port = free_port()
        self.place = Place(port)
        if self.kind == "same port" and self.way.starter == "launcher":
            self.more = ("--master-port", str(port))

    def strike(self, job: Job, server: ForkServer) -> None:
        output = "run" if self.kind == "second job" else "other"
        arguments = self.way.arguments(output, *self.more)
        place = self.place if self.kind == "same port" else None
        Job(server, self.way, arguments, self.folder, job.log, place, prefix="b-")


class BrokenPipe(Disturbance):
    """Whoever reads standard output leaves."""

    goes_on = True

    def set_up(self) -> None:
        self._pipe = self.folder / "pipe"
        os.mkfifo(self._pipe)
        self._reader = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.request = {"out": str(self._pipe)}

    def strike(self, job: Job, server: ForkServer) -> None:
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._reader, 1 << 16).decode(errors="replace")
            Path(f"{job.log}-pipe.out").write_text(text)
        self.clean_up()

    def clean_up(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._pipe.unlink()
        self._reader = -1


class CutLink(Disturbance):
    """A host of two, each a network namespace, is cut off."""

    def set_up(self) -> None:
        # Shorter, as it has to run out.
        self.more = ("--set", "comm.timeout_s=8")
        self._cluster = EmulatedCluster(2)
        self._cluster.__enter__()
        hosts = tuple(self._cluster.namespaces[:2])
        self.place = Place(29500, self._cluster.address(0), hosts)

    def strike(self, job: Job, server: ForkServer) -> None:
        host = self.draw.randrange(2)
        self.detail["host"] = host
        self._cluster.cut(host)

    def clean_up(self) -> None:
        self._cluster.close()


KINDS: dict[str, type[Disturbance]] = {
    "full disk": FullDisk, "read-only": ReadOnly, "suspended": Suspended, "second job": SecondJob,
    "same port": SecondJob, "broken pipe": BrokenPipe, "cut link": CutLink,
}  # fmt: skip


def create(kind: str, draw: random.Random, way: Way, folder: Path) -> Disturbance:
    made = KINDS.get(kind, Kill if kind.startswith("kill") else Signal)
    return made(kind, draw, way, folder)


def unavailable() -> dict[str, str]:
    """Kinds that this machine cannot have, with the reason."""
    found = {}
    reason = why_unavailable()
    if reason:
        found["cut link"] = reason
    if os.geteuid() != 0:
        found["full disk"] = "mounting a tmpfs needs root"
    return found


def draw_kinds(draw: random.Random, way: Way, left_out: dict[str, str]) -> list[str]:
    """What happens to each attempt of a trial, one after the other."""
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in left_out}
    absent = {"kill launcher"} if way.starter != "launcher" else set()
    if way.ranks == 1:
        absent |= {"kill all", "kill two", "same port"}
    if way.starter != "hand":
        absent.add("cut link")
    kinds = [kind for kind in weights if kind not in absent]
    if not kinds:
        return []
    chosen = draw.choices(kinds, [weights[kind] for kind in kinds], k=draw.randint(1, 8))
    if way.ranks > 2 and way.exchange == "hybrid":
        # With two ranks on each of two hosts the sums have another order than on one host.
        chosen = [kind for kind in chosen if kind != "cut link"]
    # One at most of these, which take seconds of waiting.
    slow = [kind for kind in chosen if kind in ("cut link", "suspended")][1:]
    for kind in slow:
        chosen.remove(kind)
    return chosen


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = TMPFS_MIB) -> Iterator[Path]:
    """`folder` as a disk of its own, which a trial fills."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
