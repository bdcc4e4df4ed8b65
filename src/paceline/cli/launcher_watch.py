"""`LauncherWatch`: ends a rank whose launcher is gone, so that no orphan is left.

When the launcher (torchrun, mpirun, slurmstepd or our own) has been killed, the rank stops as at SIGTERM:
between steps with a checkpoint, before the first step at once. A rank that has not ended after half a
minute hangs, and is ended.

The launcher is the nearest ancestor without the variables that make this process a rank: wrapper shells
inherit them, the launcher does not have them. Processes without a launcher (a single one under nohup or
tmux, ranks started by hand) are not watched, nor those whose chain of ancestors ends at process 1.
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

from paceline.cli.failure import LAUNCHER_VARIABLE, Failure
from paceline.core.errors import CommError, LaunchError
from paceline.core.topology import Topology

_POLL_S = 1.0
# As long as torch's agent lets ranks save after a signal.
_STOP_S = 30.0
_REPORT_S = 2.0
_PROC = Path("/proc")
# The start time of a process that /proc does not show to this user.
_HIDDEN = "?"
# A variable that each launcher sets for its ranks, and does not have itself.
_RANK_VARIABLES = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


@dataclass(frozen=True)
class Launcher:
    """A process, identified by id and start time, because ids are reused."""

    name: str
    pid: int
    start: str

    def is_gone(self) -> bool:
        """A zombie has ended too. A process that /proc hides (`hidepid`) is gone once it takes no
        signal."""
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
    """None where there is no such process, or it is hidden."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
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
    # Together with torch's own variable: a shell that was started from a rank may have the first alone.
    if env.get(LAUNCHER_VARIABLE, "").isdecimal() and "TORCHELASTIC_RUN_ID" in env:
        return _own_launcher(int(env[LAUNCHER_VARIABLE]))
    try:
        topology = Topology.from_env(env)
    except CommError:  # the command itself reports it
        return None
    variable = _RANK_VARIABLES.get(topology.launcher)
    # A single srun task may be an interactive shell.
    if variable is None or (topology.world_size == 1 and topology.launcher != "torchrun"):
        return None
    pid = os.getppid()
    while pid > 1:
        found = _stat(pid)
        if found is None and _exists(pid):
            return Launcher(topology.launcher, pid, _HIDDEN)
        if found is None:  # it ended just now, and this process has another parent
            pid = os.getppid()
            continue
        if not _has(pid, variable, env[variable]):
            return Launcher(topology.launcher, pid, found.start)
        pid = found.parent
    return None


def _own_launcher(pid: int) -> Launcher:
    """`paceline train --nproc-per-node`, whose id is known; it may have ended already."""
    found, ancestor = _stat(pid), os.getppid()
    while ancestor > 1 and ancestor != pid:
        above = _stat(ancestor)
        ancestor = above.parent if above else 0
    if found is None and ancestor == pid and _exists(pid):
        return Launcher("paceline train --nproc-per-node", pid, _HIDDEN)
    start = found.start if found and ancestor == pid else ""
    return Launcher("paceline train --nproc-per-node", pid, start)


def _has(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with this variable. False for a process of another user, which cannot
    be read: a launcher's daemon (slurmstepd) may be root's, a wrapper shell is not."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in entries


class LauncherWatch:
    """A daemon thread until the process ends, where there is a launcher to watch."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._launcher = find_launcher(env)
        # The error to report at the end: whatever fails after the launcher is a consequence.
        self.error: LaunchError | None = None
        if self._launcher is not None:
            threading.Thread(target=self._watch, name="paceline-launcher", daemon=True).start()

    def _watch(self) -> None:
        assert self._launcher is not None
        while not self._launcher.is_gone():
            time.sleep(_POLL_S)
        self.error = LaunchError(
            f"the launcher of this rank ({self._launcher}) is gone",
            "the rank ends with it; go on with --resume auto",
        )
        if not callable(signal.getsignal(signal.SIGTERM)):
            self._end()  # there is no handler yet, and nothing to save
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_S)
        self._end()

    def _end(self) -> None:
        """Without exit handlers, which may wait for ranks that have ended."""
        assert self.error is not None
        report = threading.Thread(target=self._report, args=(self.error,), daemon=True)
        report.start()
        report.join(_REPORT_S)  # a pipe without a reader must not block the exit
        os._exit(self.error.exit_code)

    def _report(self, error: LaunchError) -> None:
        with suppress(OSError, ValueError):  # the launcher may have been the reader
            Failure.of(error).report()
            sys.stdout.flush()
