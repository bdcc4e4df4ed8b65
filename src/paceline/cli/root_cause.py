"""Which of several failed ranks tells what went wrong.

In: the failures that torch's agent collected, in the order in which it saw them. Out: the failure that
is no other one's consequence, or an exit code where there is nothing to tell.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol

from paceline.cli.failure import Failure

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
