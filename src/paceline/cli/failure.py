"""`Failure`: the error that ends a process, on standard error and in the file of torchrun's agent."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CommError, PacelineError
from paceline.core.untrusted import one_line, printable

# The process id of `paceline train --nproc-per-node`, in the environment of its children.
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
# The connections of a killed process break before its children can see that it has ended.
_LAUNCHER_END_S = 1.0
# A variable that each launcher sets for its ranks, and does not have itself.
RANK_VARIABLES = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


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


class Unwatched:
    """For a process that no launcher has started: nothing but its own failures ends it."""

    def __init__(self) -> None:
        _reports.shown = False  # one report of each command

    def cause(self, failure: Failure) -> Failure:
        """The failure that is the cause of this one."""
        return failure

    def loss(self) -> Failure | None:
        """The failure of a rank whose launcher is gone."""
        return None


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
