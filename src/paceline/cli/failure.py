"""`Failure`: the error that ends a process, on standard error and in the error file of torchrun's agent;
and `root_cause`, which chooses among the failures of several ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.errors import CommError, PacelineError
from paceline.core.untrusted import one_line, printable

# The process id of `paceline train --nproc-per-node`, in the environment of its children.
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
# The connections of a killed process break before its children can see that it has ended.
_LAUNCHER_END_S = 1.0
# Exit codes of ranks that saved and stopped on request.
_ASKED_TO_STOP = {
    128 + number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    )
}  # fmt: skip
# The agent sends SIGTERM to the other ranks when one has ended, which may interrupt their exit.
_TERMINATED = {-signal.SIGTERM}


def is_child_of_launcher() -> bool:
    """False once the launcher is gone: then a rank has to report its failure itself."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def _launcher_stays() -> bool:
    """Waits long enough for a killed launcher to end."""
    deadline = time.monotonic() + _LAUNCHER_END_S
    while is_child_of_launcher() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_child_of_launcher()


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

    def report(self) -> None:
        """Records it, and shows it, unless our own launcher does: it shows the root cause only."""
        self.record()
        waits = self.consequence or self.between_ranks
        if not (_launcher_stays() if waits else is_child_of_launcher()):
            self.show()

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


class ChildFailure(Protocol):
    """The part of torch's record of a failed process that is read; `exitcode` is -n for signal n."""

    @property
    def message(self) -> object: ...

    @property
    def exitcode(self) -> int: ...


def root_cause(failures: Mapping[int, ChildFailure]) -> Failure | int:
    """The failure to show, of all that the agent has collected, in the order in which it saw them; an
    exit code where the ranks stopped on request.

    A rank that reported a cause comes first, then one that ended without a report, then consequences.
    """
    reported = {
        rank: Failure.from_record(failure.message, failure.exitcode)
        for rank, failure in failures.items()
    }
    for failure in reported.values():
        if failure and not failure.consequence:
            return failure
    silent = [rank for rank, failure in reported.items() if failure is None]
    codes = {failures[rank].exitcode for rank in silent}
    expected = _ASKED_TO_STOP | _TERMINATED
    if codes & _ASKED_TO_STOP and codes <= expected:
        return max(codes)
    # The agent kills ranks that do not stop, but it saw the end of the first one before.
    ended = [rank for rank in silent if failures[rank].exitcode not in expected] or silent
    if ended:
        return Failure(_unreported_end(ended[0], failures[ended[0]].exitcode), 1)
    return next(failure for failure in reported.values() if failure)


def _unreported_end(rank: int, exit_code: int) -> str:
    """For a rank that was killed, or crashed in native code."""
    if exit_code >= 0:
        return (
            f"rank {rank} ended with exit code {exit_code} without a message; see its output above"
        )
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-exit_code}"
    hint = "was it out of memory? lower --batch-size or --workers; " if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}; {hint}continue with --resume auto"
