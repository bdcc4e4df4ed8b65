"""Errors that a user can cause: one line each, with the cause and the remedy.

In: what is wrong and what to do about it. Out: an exception whose text is the very line that the
command line shows, and the exit code it leaves with. Our own bugs are not these: they keep their
traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.untrusted import one_line, short_repr


class PacelineError(ValueError):
    """An error that a user can fix; `str()` is one line, `cause; remedy`."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        # Causes quote names of files, tar members and keys: none may reach a terminal as it is.
        self.cause = one_line(cause)
        self.remedy = one_line(remedy)
        super().__init__(f"{self.cause}; {self.remedy}" if self.remedy else self.cause)

    def __reduce__(self) -> tuple[Callable[..., PacelineError], tuple[Any, ...]]:
        # Errors cross process borders. Python's own way calls the class with the finished line,
        # which a subclass with other parameters does not take.
        return _revive, (type(self), self.args, self.__dict__)


def _revive(
    cls: type[PacelineError], args: tuple[Any, ...], state: dict[str, Any]
) -> PacelineError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(PacelineError):
    """A setting that cannot be used. Names the field, its value and a value that would do."""

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str = "") -> None:
        self.field = field
        shown = "" if value is None else f" = {short_repr(value)}"
        super().__init__(f"{field}{shown}: {problem}", remedy)


class DataError(PacelineError):
    """Data that is missing, unreadable or wrongly labelled."""


class CheckpointError(PacelineError):
    """A checkpoint that cannot be written, read, or used for this run."""


class CommError(PacelineError):
    """Ranks that cannot meet, or do not agree."""


class LaunchError(PacelineError):
    """A child process that could not be started, or that failed."""


class RunError(PacelineError):
    """A run that had to stop: diverged, or failed on some rank."""


class DivergedError(RunError):
    """A run that kept skipping steps: its rate is too high for it."""


class DeviceError(RunError):
    """The GPU's context is lost: calls into CUDA fail or do not return, so nothing is torn down and the
    process ends at once."""


def is_compile_error(error: Exception) -> bool:
    """Returns True for an error of torch.compile or Triton. By name, because importing the compiler takes
    a second."""
    return any(
        kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
        for kind in type(error).__mro__
    )


def compile_reason(error: Exception) -> str:
    """Returns the first line with a reason: torch adds pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" only announces it.
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)[:200]


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the whole list where nothing is near."""
    names = sorted(known)
    # Keys of a foreign document may be anything, also long, and the search takes the square of it.
    close = difflib.get_close_matches(str(name)[:100], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(names)
