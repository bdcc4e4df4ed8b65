"""`Failure`: how a process ended badly, and how a launcher learns of it.

In: an error. Out: one line on standard error (or a traceback, for a bug of ours), and the error file
that torchrun's agent reads, in its own format.
"""

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
CHILD_MARK = "PACELINE_LAUNCHER"


# The connections of a process that is killed break before its children see that it has ended.
_LAUNCHER_END_S = 1.0


def is_child_of_launcher() -> bool:
    """False once the launcher is gone: then a rank has to speak for itself."""
    return os.environ.get(CHILD_MARK) == str(os.getppid())


def _launcher_stays() -> bool:
    """Whether the launcher is still there after a moment in which one that was killed would end."""
    deadline = time.monotonic() + _LAUNCHER_END_S
    while is_child_of_launcher() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_child_of_launcher()


@dataclass(frozen=True)
class Failure:
    """`consequence`: another rank's failure is the cause, and is shown in its place."""

    line: str
    exit_code: int
    trace: str = ""
    consequence: bool = False
    # Between ranks: what broke there may have broken because the launcher, with its store, is gone.
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

    def tell(self) -> None:
        """Shows it, or leaves that to our own launcher, which shows only the root cause."""
        self.record()
        waits = self.consequence or self.between_ranks
        if not (_launcher_stays() if waits else is_child_of_launcher()):
            self.show()

    def record(self) -> None:
        """Writes the error file that torch's agent names, if it names one."""
        target = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not target:
            return
        # The agent shows the call stack in its summary, and nothing else of this.
        extra = {"py_callstack": self.trace or self.line, "timestamp": str(int(time.time()))}
        extra |= {"exit_code": str(self.exit_code), "consequence": str(int(self.consequence))}
        extra["trace"] = self.trace
        with suppress(OSError):  # an error about an error helps nobody
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(
                json.dumps({"message": {"message": self.line, "extraInfo": extra}}),
                encoding="utf-8",
            )

    @classmethod
    def from_record(cls, message: object, exit_code: int) -> Failure | None:
        """The inverse of `record`, from what the agent hands over."""
        if not isinstance(message, dict):
            return None
        extra = message.get("extraInfo", {})
        return cls(
            str(message.get("message", "")),
            int(extra.get("exit_code", exit_code)),
            str(extra.get("trace", "")),
            extra.get("consequence") == "1",
        )


# Which of several failed ranks tells what went wrong.
#
# In: the failures that torch's agent collected, in the order in which it saw them. Out: the
# failure that is no other one's consequence, or an exit code where there is nothing to tell.


# Ranks that were asked to stop have saved and said so.
_ASKED_TO_STOP = {
    128 + number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    )
}  # fmt: skip
# When one rank has ended, the agent asks the others to; that may cut short how they leave.
_HURRIED = {-signal.SIGTERM}


class ChildFailure(Protocol):
    """What we read of torch's record of a failed process; `exitcode` is -n where signal n ended it."""

    @property
    def message(self) -> object: ...

    @property
    def exitcode(self) -> int: ...


def root_cause(failures: Mapping[int, ChildFailure]) -> Failure | int:
    """A rank's own words first; then a rank that fell silent; then what the others made of it."""
    told = {
        rank: Failure.from_record(failure.message, failure.exitcode)
        for rank, failure in failures.items()
    }
    causes = [failure for failure in told.values() if failure and not failure.consequence]
    if causes:
        return causes[0]
    silent = [rank for rank, failure in told.items() if failure is None]
    codes = {failures[rank].exitcode for rank in silent}
    expected = _ASKED_TO_STOP | _HURRIED
    if codes & _ASKED_TO_STOP and codes <= expected:
        return max(codes)
    # Those that do not hear it are killed; the agent saw the first one's end before it did so.
    ended = [rank for rank in silent if failures[rank].exitcode not in expected] or silent
    if ended:
        return Failure(_silent_end(ended[0], failures[ended[0]].exitcode), 1)
    return next(failure for failure in told.values() if failure)


def _silent_end(rank: int, exit_code: int) -> str:
    """A child that left no word: killed, or crashed in native code."""
    if exit_code >= 0:
        return f"rank {rank} ended with exit code {exit_code} without a word; see its output above"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-exit_code}"
    hint = "was it out of memory? lower --batch-size or --workers; " if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}; {hint}continue with --resume auto"
