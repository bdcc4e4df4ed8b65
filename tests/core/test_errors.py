"""Errors read as one line, and survive the way from one process to another."""

import pickle

import pytest

from paceline.core import errors
from paceline.core.errors import ConfigError, DataError, PacelineError, nearest

ALL_KINDS = [
    errors.CheckpointError,
    errors.CommError,
    errors.DataError,
    errors.DivergedError,
    errors.LaunchError,
    errors.PacelineError,
    errors.RunError,
]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_is_one_line_with_a_non_zero_exit_code(kind: type[PacelineError]) -> None:
    error = kind("first\nsecond\r\n\tthird\u2028fourth", "do\nthis")
    assert str(error) == "first second third fourth; do this"
    assert isinstance(error, ValueError)
    assert error.exit_code != 0


def test_config_error_names_field_value_and_remedy() -> None:
    error = ConfigError("optim.lr", -0.1, "must be positive", "try 0.1")
    assert str(error) == "optim.lr = -0.1: must be positive; try 0.1"
    assert error.field == "optim.lr"
    assert error.exit_code == 2


def test_nearest_offers_a_close_name_or_the_whole_list() -> None:
    assert nearest("resnet5O", ["resnet50", "alexnet"]) == "did you mean 'resnet50'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    for anything in (3, None, "x" * 100_000):
        assert nearest(anything, ["seed"]) == "known: seed"  # type: ignore[arg-type]


class OtherParametersError(PacelineError):
    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@pytest.mark.parametrize(
    "error",
    [
        DataError("cause", "remedy"),
        ConfigError("optim.lr", -0.1, "must be positive", "try 0.1"),
        OtherParametersError("from rank 3", 7),
    ],
)
def test_errors_cross_process_borders(error: PacelineError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert arrived.__dict__ == error.__dict__
    assert arrived.exit_code == error.exit_code
