"""`LauncherWatch`: ends a rank whose launcher is gone, so that no rank is left behind as an orphan.

In: the launcher's environment and the chain of this process's ancestors. Out: nothing, as long as the
launcher lives. Once it is gone (kill -9 of torchrun, mpirun, slurmstepd or our own), the rank stops as
at SIGTERM: between steps with a checkpoint, before the first step at once. A rank that has not ended
half a minute later is stuck, and is ended.

The launcher is the nearest ancestor without the variables that make this process a rank: wrapper shells
between the two inherit them, the launcher itself does not have them. Processes that no launcher started
(a single one under nohup or tmux, ranks started by hand) have nobody to watch and live on; so has one
whose chain ends at process 1, whose end is the container's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.failure import CHILD_MARK, Failure
from paceline.core.errors import CommError, LaunchError
from paceline.core.topology import Topology

_POLL_S = 1.0
# As long as torch's agent gives ranks to save after a signal.
_LEAVE_S = 30.0
_SAY_S = 2.0
_PROC = Path("/proc")
# The start time of a process that /proc does not show to this user.
_HIDDEN = "?"
# By launcher: a variable that it sets for its ranks, and does not have itself.
_MARKS = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


@dataclass(frozen=True)
class Launcher:
    """A process, by its id and start time: another one may get the id later."""

    name: str
    pid: int
    start: str

    def is_gone(self) -> bool:
        """A zombie has ended too, though nobody has taken its exit code yet. A process that /proc hides
        (`hidepid`) is gone once it takes no signal."""
        found = _stat(self.pid)
        if found is None or self.start == _HIDDEN:
            return not _exists(self.pid)
        return found.state in "ZX" or found.start != self.start

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start: str


def _stat(pid: int) -> _Stat | None:
    """What /proc says of a process; None where there is no such process, or it is hidden."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold spaces and brackets itself.
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """The process that started this rank, however many shells are between; None where there is none."""
    if not (_PROC / "self" / "stat").exists():
        return None
    # Together with torch's own mark: a shell that was started from a rank may carry the first alone.
    if env.get(CHILD_MARK, "").isdecimal() and "TORCHELASTIC_RUN_ID" in env:
        return _own_launcher(int(env[CHILD_MARK]))
    try:
        topology = Topology.from_env(env)
    except CommError:  # the command itself says so
        return None
    mark = _MARKS.get(topology.launcher)
    # A single srun task may be an interactive shell, in which a user works as on any host.
    if mark is None or (topology.world_size == 1 and topology.launcher != "torchrun"):
        return None
    pid = os.getppid()
    while pid > 1:
        found = _stat(pid)
        if found is None and _exists(pid):
            return Launcher(topology.launcher, pid, _HIDDEN)
        if found is None:  # it ended just now, and this process has another parent
            pid = os.getppid()
            continue
        if not _has(pid, mark, env[mark]):
            return Launcher(topology.launcher, pid, found.start)
        pid = found.parent
    return None


def _own_launcher(pid: int) -> Launcher:
    """Of `paceline train --nproc-per-node`, whose id is known; it may have ended already."""
    found, ancestor = _stat(pid), os.getppid()
    while ancestor > 1 and ancestor != pid:
        above = _stat(ancestor)
        ancestor = above.parent if above else 0
    if found is None and ancestor == pid and _exists(pid):
        return Launcher("paceline train --nproc-per-node", pid, _HIDDEN)
    start = found.start if found and ancestor == pid else ""
    return Launcher("paceline train --nproc-per-node", pid, start)


def _has(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with this variable. One of another user cannot be asked: a
    launcher's daemon (slurmstepd) may be root's, a wrapper shell is not."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in entries


class LauncherWatch:
    """A daemon thread until the process ends, where there is a launcher to watch."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._launcher = find_launcher(env)
        # What this rank has to say at its end: nothing that breaks after the launcher is a cause.
        self.error: LaunchError | None = None
        if self._launcher is not None:
            threading.Thread(target=self._serve, name="paceline-launcher", daemon=True).start()

    def _serve(self) -> None:
        assert self._launcher is not None
        while not self._launcher.is_gone():
            time.sleep(_POLL_S)
        self.error = LaunchError(
            f"the launcher of this rank ({self._launcher}) is gone",
            "the rank ends with it; go on with --resume auto",
        )
        if not callable(signal.getsignal(signal.SIGTERM)):
            self._end()  # nobody would save at SIGTERM: there is nothing to save yet
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LEAVE_S)
        self._end()

    def _end(self) -> None:
        """Not by way of exit handlers: they may wait for ranks that have ended."""
        assert self.error is not None
        said = threading.Thread(target=self._say, args=(self.error,), daemon=True)
        said.start()
        said.join(_SAY_S)  # a pipe that nobody reads must not keep the process
        os._exit(self.error.exit_code)

    def _say(self, error: LaunchError) -> None:
        with suppress(OSError, ValueError):  # the launcher may have been the reader
            Failure.of(error).tell()
            sys.stdout.flush()
