"""Errors that a user can cause: one line each, with the cause and the remedy.

The text of an exception is the line that the command line shows, and its class determines the exit code.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.untrusted import one_line, short_repr


class PacelineError(ValueError):
    """An error that a user can fix. `str()` is one line with the cause and, if known, the remedy."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        # Causes quote names of files, tar members and keys, which may contain escape sequences.
        self.cause = one_line(cause)
        self.remedy = one_line(remedy)
        super().__init__(f"{self.cause}; {self.remedy}" if self.remedy else self.cause)

    def __reduce__(self) -> tuple[Callable[..., PacelineError], tuple[Any, ...]]:
        # Errors are sent to other processes. By default Python calls the class with the finished line,
        # which a subclass with other parameters does not accept.
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(
    cls: type[PacelineError], args: tuple[Any, ...], state: dict[str, Any]
) -> PacelineError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(PacelineError):
    """Raised for a setting that cannot be used.

    Args:
        field: The name of the setting or flag.
        value: The value of the setting; None is not shown.
        problem: Why the value cannot be used.
        remedy: What the user can do.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str = "") -> None:
        self.field = field
        shown = "" if value is None else f" = {short_repr(value)}"
        super().__init__(f"{field}{shown}: {problem}", remedy)


class DataError(PacelineError):
    """Raised for data that is missing or unreadable, or has wrong labels."""


class CheckpointError(PacelineError):
    """Raised for a checkpoint that cannot be written, read, or used for this run."""


class CommError(PacelineError):
    """Raised if ranks cannot connect, cannot communicate or do not agree."""


class LaunchError(PacelineError):
    """Raised if a child process could not be started or failed."""


class RunError(PacelineError):
    """Raised if a run had to stop because it diverged or failed on a rank."""


class DivergedError(RunError):
    """Raised if a run has skipped too many steps, usually because the learning rate is too high."""


class DeviceError(RunError):
    """Raised if the CUDA context of the GPU is lost.

    Calls into CUDA fail or do not return, so the process ends at once without cleaning up.
    """


def is_compile_error(error: Exception) -> bool:
    """Returns True for an error of torch.compile or Triton."""
    # Compares names, because importing the compiler takes a second.
    return any(
        kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
        for kind in type(error).__mro__
    )


def compile_reason(error: Exception) -> str:
    """Returns the line of a compile error that gives the reason; torch adds pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line such as "backend='inductor' raised:" only announces the reason.
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)[:200]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a remedy with the name in `known` that is most similar, or with all known names."""
    names = sorted(known)
    # Names from an untrusted document can be long, and the search time is quadratic in the length.
    close = difflib.get_close_matches(str(name)[:100], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(names)
