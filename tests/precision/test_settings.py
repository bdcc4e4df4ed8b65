from __future__ import annotations

import math

import pytest

from paceline.core.errors import ConfigError
from paceline.precision.settings import AMP_DTYPES, PrecisionSettings


@pytest.mark.parametrize("name", AMP_DTYPES)
def test_every_format_is_accepted(name: str) -> None:
    assert PrecisionSettings(amp_dtype=name).amp_dtype == name


def test_an_unknown_format_gets_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionSettings(amp_dtype="fp61")
    assert str(caught.value) == "precision.amp_dtype = 'fp61': unknown; did you mean 'fp16'?"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["loss_scale", "loss_scale_init", "loss_scale_min", "loss_scale_max"]
)
@pytest.mark.parametrize("value", [0.0, -2.0, math.inf, math.nan])
def test_a_scale_must_be_a_positive_number(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionSettings(**{name: value})
    assert str(caught.value) == f"precision.{name} = {value}: must be above 0; 65536 is usual"


@pytest.mark.parametrize(
    "values",
    [
        {"loss_scale_init": 0.5},
        {"loss_scale_init": 2.0**25},
        {"loss_scale_min": 4.0, "loss_scale_max": 2.0, "loss_scale_init": 3.0},
    ],
)
def test_the_first_scale_lies_between_floor_and_ceiling(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"loss_scale_init = .*must lie between loss_scale_min"):
        PrecisionSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1])
def test_the_interval_is_at_least_one(value: int) -> None:
    with pytest.raises(ConfigError, match=f"loss_scale_interval = {value}: must be at least 1"):
        PrecisionSettings(loss_scale_interval=value)
