"""`AgreedError`, which all ranks raise together, and `PeerError`, for the loss of another rank."""

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
    """An error that all ranks raise; `exit_code` is the exit code of the rank that failed."""

    def __init__(self, text: str, exit_code: int) -> None:
        PacelineError.__init__(self, text)
        self.exit_code = exit_code

    @classmethod
    def of_kind(cls, kind: str, text: str, exit_code: int) -> AgreedError:
        """Returns an AgreedError that is also an instance of the error class named `kind`.

        `kind` is the class of the error on the rank that failed. So a program can catch this class on
        all ranks.
        """
        return _KINDS.get(kind, cls)(text, exit_code)


class AgreedConfigError(AgreedError, ConfigError):
    """A ConfigError that occurred on some rank. Its `field` is empty, as not all ranks know it."""

    field = ""


class AgreedDataError(AgreedError, DataError):
    """A DataError that occurred on some rank and that all ranks raise."""


class AgreedCheckpointError(AgreedError, CheckpointError):
    """A CheckpointError that occurred on some rank and that all ranks raise."""


class AgreedRunError(AgreedError, RunError):
    """A RunError that occurred on some rank and that all ranks raise."""


class PeerError(CommError):
    """Raised on this rank because another process failed or ended."""

    @classmethod
    def from_agreed(cls, cause: AgreedError) -> PeerError:
        """Returns an error with the message and the exit code of the rank that failed."""
        error = cls(str(cause))
        error.exit_code = cause.exit_code
        return error


class LostMemberError(PeerError):
    """Raised if a rank is lost. The other ranks can continue after a call of `Group.regroup`."""


class AgreedLostMemberError(AgreedError, LostMemberError):
    """A LostMemberError that another rank has raised first."""


_KINDS: dict[str, type[AgreedError]] = {
    "ConfigError": AgreedConfigError,
    "DataError": AgreedDataError,
    "CheckpointError": AgreedCheckpointError,
    "RunError": AgreedRunError,
    "LostMemberError": AgreedLostMemberError,
}


def error_kind(error: PacelineError) -> str:
    """Returns the name of the class of `error` for `AgreedError.of_kind`, or "" for other classes."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), "")
