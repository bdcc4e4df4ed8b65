"""Piecewise and range schedules against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.optim import SGD, AdamW, LrSchedule, OptimSettings, set_rate


def made(kind: str, total: int = 100, per_epoch: float = 10.0, **values: Any) -> LrSchedule:
    return LrSchedule(OptimSettings.gather(schedule=kind, **values), 2.0, total, per_epoch)


def rates(schedule: LrSchedule, steps: int = 100) -> list[float]:
    return [schedule.rate(step) for step in range(steps)]


def test_piecewise_takes_one_share_after_another() -> None:
    """Akiba et al. 2017: half of the rate first, and three decays."""
    schedule = made("piecewise", warmup_epochs=0, epochs=(4.0, 7.0, 8.5))
    wanted = np.repeat([1.0, 0.15, 0.02, 0.002], [40, 30, 15, 15])
    assert rates(schedule) == pytest.approx(wanted.tolist())


def test_momentum_reaches_the_groups() -> None:
    weight = nn.Parameter(torch.zeros(3))
    sgd, adam = SGD([weight], lr=0.1), AdamW([weight], lr=0.1)
    for optimizer in (sgd, adam):
        set_rate(optimizer, 0.5, {"momentum": 0.8})
    assert sgd.param_groups[0]["momentum"] == 0.8
    assert adam.param_groups[0]["betas"] == (0.8, 0.999)
