"""`Failure`: how a process ended badly, and how a launcher learns of it.

In: an error. Out: one line on standard error (or a traceback, for a bug of ours), and the error file
that torchrun's agent reads, in its own format.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
