"""`Failure`: the error that ends a process, on standard error and in the error file of torchrun's agent;
and `LauncherWatch`, which ends a rank whose launcher is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.core.errors import CommError, LaunchError, PacelineError
from paceline.core.host import DeferredEnd, in_thread, process_ids, process_stat, started_with
from paceline.core.topology import Topology
from paceline.core.untrusted import one_line, printable

# The process id of `paceline train --nproc-per-node`, in the environment of its children.
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
# The connections of a killed process break before its children can see that it has ended.
_LAUNCHER_END_S = 1.0
# The same under torchrun, which ends the other ranks a tenth of a second after the first one.
_LAUNCHER_SEEN_S = 0.05


def is_child_of_launcher() -> bool:
    """False once the launcher is gone: then a rank has to report its failure itself."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def _launcher_stays() -> bool:
    """Waits long enough for a killed launcher to end."""
    deadline = time.monotonic() + _LAUNCHER_END_S
    while is_child_of_launcher() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_child_of_launcher()


class _Reports:
    """Of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shown = False


_reports = _Reports()


@dataclass(frozen=True)
class Failure:
    """`consequence`: another rank's failure is the cause, and is shown instead."""

    line: str
    exit_code: int
    trace: str = ""
    consequence: bool = False
    # An error of communication, which may have been caused by the end of the launcher and its store.
    between_ranks: bool = False

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        kind = type(error).__name__
        between = isinstance(error, CommError) or kind == "AgreedError"
        return cls(
            str(error), error.exit_code, consequence=kind == "PeerError", between_ranks=between
        )

    def show(self) -> None:
        if self.trace:
            sys.stderr.write("".join(f"{printable(line)}\n" for line in self.trace.splitlines()))
        sys.stderr.write(f"paceline: error: {one_line(self.line)}\n")
        sys.stderr.flush()

    def report(self) -> int:
        """Records it, and shows it, unless our own launcher does: it shows the root cause only. Returns
        the exit code.

        Only the first failure that is shown counts: the main thread, the watch of the launcher and the
        watchdog of the ranks may find the cause of one end at the same time. The others wait until it
        is written, because they end the process next.
        """
        with _reports.lock:
            if not _reports.shown:
                self.record()
                waits = self.consequence or self.between_ranks
                if not (_launcher_stays() if waits else is_child_of_launcher()):
                    _reports.shown = True
                    self.show()
        return self.exit_code

    def record(self) -> None:
        """Writes the error file that torch's agent has named, if any, in its format."""
        target = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not target:
            return
        # Of this the agent shows the call stack only.
        extra = {"py_callstack": self.trace or self.line, "timestamp": str(int(time.time()))}
        extra |= {"exit_code": str(self.exit_code), "consequence": str(int(self.consequence))}
        extra["trace"] = self.trace
        with suppress(OSError):  # the first error matters more
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(
                json.dumps({"message": {"message": self.line, "extraInfo": extra}}),
                encoding="utf-8",
            )

    @classmethod
    def from_record(cls, message: object, exit_code: int) -> Failure | None:
        """The inverse of `record`; None for a message that is not ours."""
        if not isinstance(message, dict):
            return None
        extra = message.get("extraInfo", {})
        return cls(
            str(message.get("message", "")),
            int(extra.get("exit_code", exit_code)),
            str(extra.get("trace", "")),
            extra.get("consequence") == "1",
        )


def report_error(error: PacelineError) -> None:
    """For the watchdog of the ranks, which ends this process next."""
    Failure.of(error).report()


_POLL_S = 1.0
# As long as torch's agent lets ranks save after a signal.
_STOP_S = 30.0
_REPORT_S = 2.0
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
    variable = _RANK_VARIABLES.get(topology.launcher)
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


class LauncherWatch:
    """Ends a rank whose launcher (torchrun, mpirun, slurmstepd or our own) is gone, from a daemon thread.

    The rank stops as at SIGTERM: between steps with a checkpoint, before the first step at once. A rank
    that has not ended after half a minute hangs, and is killed.

    The launcher is the nearest ancestor without the variables that make this process a rank: wrapper
    shells inherit them, the launcher does not have them. Processes without a launcher (a single one
    under nohup or tmux, ranks started by hand) are not watched, nor those whose chain of ancestors ends
    at process 1.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        _reports.shown = False  # one report of each command
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
        """The failure of a rank whose launcher is gone."""
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
