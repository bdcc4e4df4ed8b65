"""`LauncherWatch`: ends a rank whose launcher has ended."""

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

# The wait for the end of the launcher after a communication error. When a process is killed, its
# connections break before its children can see its end. Torchrun ends the other ranks a tenth of a second
# after the first rank.
_LAUNCHER_SEEN_S = 0.05
_POLL_S = 1.0
# The time to save after a signal; torch's agent gives ranks the same time.
_STOP_S = 30.0
_REPORT_S = 2.0
# The start time of a process that /proc does not show to this user.
_HIDDEN = "?"


@dataclass(frozen=True)
class Launcher:
    """The process of a launcher: its id and, because ids are reused, its start time."""

    name: str
    pid: int
    start: str

    def is_gone(self) -> bool:
        """Returns True if the process has ended.

        If /proc hides the process (`hidepid`), sends signal 0 to check if the process exists.
        """
        stat = process_stat(self.pid)
        if stat is None or self.start == _HIDDEN:
            return not _exists(self.pid)
        return stat.has_ended or stat.start != self.start

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
    """Returns the process that launched this rank, or None if no launcher did.

    Shells between the launcher and the rank are skipped.
    """
    if not process_ids():
        return None
    # A shell that a rank has started can have our variable without torch's variable.
    if env.get(LAUNCHER_VARIABLE, "").isdecimal() and "TORCHELASTIC_RUN_ID" in env:
        return _own_launcher(int(env[LAUNCHER_VARIABLE]))
    try:
        topology = Topology.from_env(env)
    except CommError:  # the command reports it
        return None
    variable = RANK_VARIABLES.get(topology.launcher)
    # A single srun task may be an interactive shell.
    if variable is None or (topology.world_size == 1 and topology.launcher != "torchrun"):
        return None
    pid = os.getppid()
    while pid > 1:
        stat = process_stat(pid)
        if stat is None and _exists(pid):
            return Launcher(topology.launcher, pid, _HIDDEN)
        if stat is None:  # the parent has just ended, and this process has another parent
            pid = os.getppid()
            continue
        # The daemon of a launcher (slurmstepd) can belong to root, so its environment is unreadable.
        if not started_with(pid, variable, env[variable]):
            return Launcher(topology.launcher, pid, stat.start)
        pid = stat.parent
    return None


def _own_launcher(pid: int) -> Launcher:
    """Returns Paceline's launcher with the process id `pid`, which may have ended already."""
    stat, ancestor = process_stat(pid), os.getppid()
    while ancestor > 1 and ancestor != pid:
        above = process_stat(ancestor)
        ancestor = above.parent if above else 0
    if stat is None and ancestor == pid and _exists(pid):
        return Launcher("paceline train --nproc-per-node", pid, _HIDDEN)
    start = stat.start if stat and ancestor == pid else ""
    return Launcher("paceline train --nproc-per-node", pid, start)


class LauncherWatch(Unwatched):
    """Ends a rank whose launcher (torchrun, mpirun, slurmstepd or our own) has ended.

    A daemon thread watches the launcher. The rank stops as after SIGTERM: between steps with a
    checkpoint, or at once before the first step. A rank that still runs after half a minute is
    assumed to hang, and is killed.

    The launcher is the nearest ancestor process without the environment variables that make this process
    a rank. Wrapper shells have these variables. Processes without a launcher are not affected, such as a
    single process under nohup or tmux, or ranks that were started by hand.

    Args:
        env: The environment of this process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__()
        self._launcher = find_launcher(env)
        if self._launcher is not None:
            threading.Thread(target=self._watch, name="paceline-launcher", daemon=True).start()

    def cause(self, failure: Failure) -> Failure:
        """Returns a failure that names the end of the launcher, or `failure` if the launcher runs."""
        # `Failure.report` waits for our own launcher.
        waits = failure.between_ranks and not is_child_of_launcher()
        deadline = time.monotonic() + (_LAUNCHER_SEEN_S if waits else 0.0)
        while (gone := self.loss()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return gone or failure

    def loss(self) -> Failure | None:
        if self._launcher is None or not self._launcher.is_gone():
            return None
        error = LaunchError(
            f"the launcher of this rank ({self._launcher}) has ended, and the rank ends with it",
            "continue with --resume auto",
        )
        # Our own launcher may still be this process's parent.
        return replace(Failure.of(error), between_ranks=True)

    def _watch(self) -> None:
        while (failure := self.loss()) is None:
            time.sleep(_POLL_S)
        handler = signal.getsignal(signal.SIGTERM)
        if not callable(handler) or isinstance(getattr(handler, "__self__", None), DeferredEnd):
            # Before the first step there is nothing to save, and after the last step everything is saved.
            # After an error, an unfinished checkpoint is lost, but the checkpoint before it is kept.
            self._end(failure)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_S)
        self._end(failure)

    def _end(self, failure: Failure) -> None:
        """Ends the process without running exit handlers, which could wait for ranks that have ended."""
        await_report = in_thread(partial(self._report, failure))
        await_report(_REPORT_S)  # a pipe without a reader must not block the exit
        os._exit(failure.exit_code)

    def _report(self, failure: Failure) -> None:
        with suppress(OSError, ValueError):  # the launcher may have been the reader
            failure.report()
            sys.stdout.flush()
