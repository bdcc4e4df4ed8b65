"""Errors of several ranks: `AgreedError`, which all raise, and `PeerError`, if another rank is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DataError,
    PacelineError,
    RunError,
)

SAME_SETTINGS = "start every rank with the same recipe and flags"
Remedies = str | Mapping[str, str]
ShowError = Callable[[PacelineError], None]


class AgreedError(PacelineError):
    """An error that all ranks raise; `exit_code` is that of the rank that found it."""

    def __init__(self, text: str, exit_code: int) -> None:
        PacelineError.__init__(self, text)
        self.exit_code = exit_code

    @classmethod
    def of_kind(cls, kind: str, text: str, exit_code: int) -> AgreedError:
        """Also of the class that the error had on the rank that found it, so that a program catches the
        same class on one rank and on many."""
        return _KINDS.get(kind, cls)(text, exit_code)


class AgreedConfigError(AgreedError, ConfigError):
    """`field` is not known any more."""

    field = ""


class AgreedDataError(AgreedError, DataError):
    """See `AgreedError.of_kind`."""


class AgreedCheckpointError(AgreedError, CheckpointError):
    """See `AgreedError.of_kind`."""


class AgreedRunError(AgreedError, RunError):
    """See `AgreedError.of_kind`."""


_KINDS: dict[str, type[AgreedError]] = {
    "ConfigError": AgreedConfigError,
    "DataError": AgreedDataError,
    "CheckpointError": AgreedCheckpointError,
    "RunError": AgreedRunError,
}


def error_kind(error: PacelineError) -> str:
    """The name of the public class that `error` belongs to."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), "")


class PeerError(CommError):
    """Something failed because another process is gone: a consequence, not a cause."""

    @classmethod
    def from_agreed(cls, cause: AgreedError) -> PeerError:
        """With the message and the exit code of the rank that failed."""
        error = cls(str(cause))
        error.exit_code = cause.exit_code
        return error
