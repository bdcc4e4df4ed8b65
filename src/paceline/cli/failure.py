"""`Failure`: an error that ends a process, and how it is reported to the user and to torchrun."""

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

# The environment variable that tells ranks the process id of `paceline train --nproc-per-node`.
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
# The connections of a killed process break before its children can see that it has ended.
_LAUNCHER_END_S = 1.0
# For each launcher, a variable in the environment of its ranks but not of the launcher itself.
RANK_VARIABLES = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


def is_child_of_launcher() -> bool:
    """Returns True if Paceline's launcher started this process.

    The launcher then shows the errors of this process.
    """
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def _launcher_stays() -> bool:
    """Returns True if the launcher still runs, after waiting in case it is about to end."""
    deadline = time.monotonic() + _LAUNCHER_END_S
    while is_child_of_launcher() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_child_of_launcher()


class _Reports:
    """State shared by all `Failure`s of this process: a lock, and whether an error was shown."""

    lock = threading.Lock()
    shown = False


class Unwatched:
    """Replaces `LauncherWatch` in processes that no launcher has started."""

    def __init__(self) -> None:
        _Reports.shown = False  # each command reports once

    def cause(self, failure: Failure) -> Failure:
        """Returns the failure that caused `failure`, which is `failure` itself without a launcher."""
        return failure

    def loss(self) -> Failure | None:
        """Returns the failure of a rank whose launcher has ended, or None if the launcher runs."""
        return None


@dataclass(frozen=True)
class Failure:
    """An error that ends this process, with the message to show and the exit code.

    Attributes:
        line: The message in one line.
        exit_code: The exit code of the process.
        trace: The traceback if the error is a bug, else empty.
        consequence: True if the failure of another rank is the cause. The error of that rank is
            shown instead.
        between_ranks: True for a communication error, which may be due to the end of the launcher.
    """

    line: str
    exit_code: int
    trace: str = ""
    consequence: bool = False
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
        """Writes the failure to standard error, unless Paceline's launcher will; returns the exit code.

        Only the first failure is shown, because the main thread, the launcher watch and the watchdog of
        the ranks can report at the same time. Other threads wait until the message is written, because
        they end the process after their report.
        """
        with _Reports.lock:
            if not _Reports.shown:
                self.record()
                waits = self.consequence or self.between_ranks
                if not (_launcher_stays() if waits else is_child_of_launcher()):
                    _Reports.shown = True
                    self.show()
        return self.exit_code

    def record(self) -> None:
        """Writes the failure to torchelastic's error file, if the launcher has named one."""
        target = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not target:
            return
        extra = {
            "py_callstack": self.trace or self.line,  # the only field that the agent shows
            "timestamp": str(int(time.time())),
            "exit_code": str(self.exit_code),
            "consequence": str(int(self.consequence)),
            "trace": self.trace,
        }
        with suppress(OSError):  # the first error matters more
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(
                json.dumps({"message": {"message": self.line, "extraInfo": extra}}),
                encoding="utf-8",
            )

    @classmethod
    def from_record(cls, message: object, exit_code: int) -> Failure | None:
        """Builds a failure from a message that `record` wrote; returns None for any other message."""
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
    """Reports an error that the watchdog has detected, before it ends this process."""
    Failure.of(error).report()
