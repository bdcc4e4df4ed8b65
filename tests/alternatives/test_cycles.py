"""One-cycle and triangular schedules against plain NumPy and torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.settings import from_table
from paceline.optim import LrSchedule, OptimSettings
from refusals import refused


def made(kind: str, total: int = 100, per_epoch: float = 10.0, **values: Any) -> LrSchedule:
    settings = from_table(OptimSettings, "optim", {"schedule": kind, **values})
    return LrSchedule(settings, 2.0, total, per_epoch)


def rates(schedule: LrSchedule, steps: int = 100) -> list[float]:
    return [schedule.rate(step) for step in range(steps)]


def test_one_cycle_is_a_triangle_and_a_tail() -> None:
    schedule = made("one_cycle", lr_end=0.002)
    points = np.interp(np.arange(100), [0, 45, 90, 100], [0.2, 2.0, 0.2, 0.002])
    assert rates(schedule) == pytest.approx(points.tolist(), rel=1e-12)
    momenta = np.interp(np.arange(100), [0, 45, 90, 100], [0.95, 0.85, 0.95, 0.95])
    found = [schedule.others(step)["momentum"] for step in range(100)]
    assert found == pytest.approx(momenta.tolist(), rel=1e-12)


def test_a_cycle_describes_that_it_has_no_warm_up() -> None:
    assert made("one_cycle", warmup_epochs=3.0).describe_cut()
    assert made("triangular", warmup_epochs=0.0).describe_cut() == ""


@pytest.mark.parametrize(("decay", "mode"), [(1.0, "triangular"), (0.5, "triangular2")])
def test_triangles_are_torchs(decay: float, mode: Any) -> None:
    schedule = made("triangular", cycle={"epochs": 3.0, "decay": decay})
    peer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    cyclic = torch.optim.lr_scheduler.CyclicLR(
        peer, 0.2, 2.0, step_size_up=15, mode=mode, cycle_momentum=False
    )
    for step in range(100):
        assert schedule.rate(step) == pytest.approx(peer.param_groups[0]["lr"]), step
        peer.step()
        cyclic.step()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cycle": {"decay": 0.0}}, "optim.cycle.decay"),
        ({"cycle": {"epochs": 0.0}}, "optim.cycle.epochs"),
        ({"cycle": {"momentum": [0.95, 0.85]}}, "optim.cycle.momentum"),
        ({"cycle": {"momentum": [0.9]}}, "optim.cycle.momentum"),
        (
            {"schedule": "one_cycle", "name": "torch.optim:RAdam", "lr": 0.1},
            "optim.cycle.momentum",
        ),
    ],
)
def test_refused_settings(values: dict[str, Any], field: str) -> None:
    with refused(field):
        from_table(OptimSettings, "optim", values)
