"""Piecewise and range schedules against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.optim import SGD, AdamW, LrSchedule, OptimSettings, set_rate


def made(kind: str, total: int = 100, per_epoch: float = 10.0, **values: Any) -> LrSchedule:
    return LrSchedule(OptimSettings(schedule=kind, **values), 2.0, total, per_epoch)


def rates(schedule: LrSchedule, steps: int = 100) -> list[float]:
    return [schedule.rate(step) for step in range(steps)]


def test_piecewise_takes_one_share_after_another() -> None:
    """Akiba et al. 2017: half of the rate first, and three decays."""
    schedule = made("piecewise", warmup_epochs=0, decay_epochs=(4.0, 7.0, 8.5))
    wanted = np.repeat([1.0, 0.15, 0.02, 0.002], [40, 30, 15, 15])
    assert rates(schedule) == pytest.approx(wanted.tolist())


def test_range_grows_by_the_same_factor() -> None:
    schedule = made("range", range_lr=(1e-3, 10.0), range_steps=50)
    wanted = np.geomspace(1e-3, 10.0, 50)
    assert rates(schedule, 50) == pytest.approx(wanted.tolist())
    assert schedule.rate(80) == pytest.approx(10.0)
    assert schedule.others(3) == {}


def test_momentum_reaches_the_groups() -> None:
    weight = nn.Parameter(torch.zeros(3))
    sgd, adam = SGD([weight], lr=0.1), AdamW([weight], lr=0.1)
    for optimizer in (sgd, adam):
        set_rate(optimizer, 0.5, {"momentum": 0.8})
    assert sgd.param_groups[0]["momentum"] == 0.8
    assert adam.param_groups[0]["betas"] == (0.8, 0.999)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"schedule": "piecewise", "decay_factors": (1.0,)}, "optim.decay_factors"),
        ({"decay_factors": (1.0, -1.0, 0.0, 0.0)}, "optim.decay_factors"),
        ({"range_lr": (1.0, 0.1)}, "optim.range_lr"),
        ({"range_steps": 1}, "optim.range_steps"),
    ],
)
def test_refused_settings(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimSettings(**values)
    assert caught.value.field == field
