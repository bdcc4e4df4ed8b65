"""`LauncherWatch`: ends a rank whose launcher is gone. A process without a launcher does not load it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from paceline.cli.failure import (
    LAUNCHER_VARIABLE,
    RANK_VARIABLES,
    Failure,
    Unwatched,
    is_child_of_launcher,
)
from paceline.core.errors import CommError, LaunchError
from paceline.core.host import DeferredEnd, in_thread, process_ids, process_stat, started_with
from paceline.core.topology import Topology

# The connections of a killed process break before its children can see that it has ended, and torchrun
# ends the other ranks a tenth of a second after the first one.
_LAUNCHER_SEEN_S = 0.05
_POLL_S = 1.0
# As long as torch's agent lets ranks save after a signal.
_STOP_S = 30.0
_REPORT_S = 2.0
# The start time of a process that /proc does not show to this user.
_HIDDEN = "?"


@dataclass(frozen=True)
class Launcher:
    """A process, identified by id and start time, because ids are reused."""

    name: str
    pid: int
    start: str

    def is_gone(self) -> bool:
        """A zombie has ended too. A process that /proc hides (`hidepid`) is gone once it takes no
        signal."""
        found = process_stat(self.pid)
        if found is None or self.start == _HIDDEN:
            return not _exists(self.pid)
        return found.has_ended or found.start != self.start

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


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
    if not process_ids():
        return None
    # Together with torch's own variable: a shell that was started from a rank may have the first alone.
    if env.get(LAUNCHER_VARIABLE, "").isdecimal() and "TORCHELASTIC_RUN_ID" in env:
        return _own_launcher(int(env[LAUNCHER_VARIABLE]))
    try:
        topology = Topology.from_env(env)
    except CommError:  # the command itself reports it
        return None
    variable = RANK_VARIABLES.get(topology.launcher)
    # A single srun task may be an interactive shell.
    if variable is None or (topology.world_size == 1 and topology.launcher != "torchrun"):
        return None
    pid = os.getppid()
    while pid > 1:
        found = process_stat(pid)
        if found is None and _exists(pid):
            return Launcher(topology.launcher, pid, _HIDDEN)
        if found is None:  # it ended just now, and this process has another parent
            pid = os.getppid()
            continue
        # A launcher's daemon (slurmstepd) may be root's, a wrapper shell is not.
        if not started_with(pid, variable, env[variable]):
            return Launcher(topology.launcher, pid, found.start)
        pid = found.parent
    return None


def _own_launcher(pid: int) -> Launcher:
    """`paceline train --nproc-per-node`, whose id is known; it may have ended already."""
    found, ancestor = process_stat(pid), os.getppid()
    while ancestor > 1 and ancestor != pid:
        above = process_stat(ancestor)
        ancestor = above.parent if above else 0
    if found is None and ancestor == pid and _exists(pid):
        return Launcher("paceline train --nproc-per-node", pid, _HIDDEN)
    start = found.start if found and ancestor == pid else ""
    return Launcher("paceline train --nproc-per-node", pid, start)


class LauncherWatch(Unwatched):
    """Ends a rank whose launcher (torchrun, mpirun, slurmstepd or our own) is gone, from a daemon thread.

    The rank stops as at SIGTERM: between steps with a checkpoint, before the first step at once. A rank
    that has not ended after half a minute hangs, and is killed.

    The launcher is the nearest ancestor without the variables that make this process a rank: wrapper
    shells inherit them, the launcher does not have them. Processes without a launcher (a single one
    under nohup or tmux, ranks started by hand) are not watched, nor those whose chain of ancestors ends
    at process 1.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__()
        self._launcher = find_launcher(env)
        if self._launcher is not None:
            threading.Thread(target=self._watch, name="paceline-launcher", daemon=True).start()

    def cause(self, failure: Failure) -> Failure:
        """The loss of the launcher, and of its store, is the cause of whatever fails after it."""
        # A launcher of our own lets `Failure.report` wait.
        waits = failure.between_ranks and not is_child_of_launcher()
        deadline = time.monotonic() + (_LAUNCHER_SEEN_S if waits else 0.0)
        while (gone := self.loss()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return gone or failure

    def loss(self) -> Failure | None:
        if self._launcher is None or not self._launcher.is_gone():
            return None
        error = LaunchError(
            f"the launcher of this rank ({self._launcher}) is gone",
            "the rank ends with it; go on with --resume auto",
        )
        # Our own launcher may still be this process's parent.
        return replace(Failure.of(error), between_ranks=True)

    def _watch(self) -> None:
        while (failure := self.loss()) is None:
            time.sleep(_POLL_S)
        handler = signal.getsignal(signal.SIGTERM)
        if not callable(handler) or isinstance(getattr(handler, "__self__", None), DeferredEnd):
            # Before the first step there is nothing to save; after the last one, all is saved. After an
            # error, a checkpoint that is still being written is lost; the one before it is there.
            self._end(failure)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_S)
        self._end(failure)

    def _end(self, failure: Failure) -> None:
        """Without exit handlers, which may wait for ranks that have ended."""
        await_report = in_thread(partial(self._report, failure))
        await_report(_REPORT_S)  # a pipe without a reader must not block the exit
        os._exit(failure.exit_code)

    def _report(self, failure: Failure) -> None:
        with suppress(OSError, ValueError):  # the launcher may have been the reader
            failure.report()
            sys.stdout.flush()
