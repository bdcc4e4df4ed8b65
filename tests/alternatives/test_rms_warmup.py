"""RMSprop warm-up against a plain NumPy implementation of its equations, and its switches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.alternatives.rms_warmup.optimizer import RMSpropWarmup
from paceline.alternatives.rms_warmup.settings import sgd_share
from paceline.optim import LrSchedule, OptimSettings, set_rate
from refusals import refused
from small_runs import run_small


def test_the_share_of_sgd() -> None:
    """Continuous, from nearly 0 to exactly 1; the re-implementations' 2(e − c)/w would overshoot."""
    epochs = np.linspace(0, 20, 401)
    found = [sgd_share(epoch, 10, 5) for epoch in epochs]
    assert found[0] == pytest.approx(0.5 * math.exp(-4))
    assert max(np.diff(found)) < 0.011
    assert max(found) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_follow_the_equations(dtype: torch.dtype, decay: float) -> None:
    chance = np.random.default_rng(0)
    start = chance.standard_normal((4, 3))
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float32).to(dtype))
    optimizer = RMSpropWarmup([weight], lr=0.1, weight_decay=decay)
    w = weight.detach().double().numpy().copy()
    s, v = np.zeros((4, 3)), np.zeros((4, 3))
    settings = OptimSettings.gather(
        name="rmsprop_warmup", center_epochs=2, width_epochs=2, schedule="piecewise",
        warmup_epochs=0, epochs=(2.0, 3.0, 4.0),
    )  # fmt: skip
    schedule = LrSchedule(settings, 0.4, 40, 8.0)
    for step in range(40):
        g = torch.tensor(chance.standard_normal((4, 3))).to(dtype)
        weight.grad = g.clone()
        rate, share = schedule.rate(step), sgd_share(step / 8, 2, 2)
        set_rate(optimizer, rate, schedule.others(step))
        optimizer.step()
        g64 = g.double().numpy() + decay * w
        s = 0.99 * s + 0.01 * g64**2
        a_rms = (1 - share) * 3e-4 / rate
        v = 0.9 * v - (share + a_rms / (np.sqrt(s) + 1e-8)) * g64
        w = w + rate * v
    assert optimizer.masters()[0].detach().numpy() == pytest.approx(w, rel=1e-4, abs=1e-5)
    if dtype != torch.float32:
        assert torch.equal(weight.detach(), optimizer.masters()[0].to(dtype))


def test_all_sgd_is_torchs() -> None:
    weights = [nn.Parameter(torch.arange(6.0)) for _ in range(2)]
    ours = RMSpropWarmup([weights[0]], lr=0.1, weight_decay=0.01, sgd_share=1.0)
    peer = torch.optim.SGD([weights[1]], lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(10):
        for weight in weights:
            weight.grad = torch.sin(torch.arange(6.0) + step)
        ours.step()
        peer.step()
    torch.testing.assert_close(weights[0], weights[1])


def test_a_run_resumes_bit_identically(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "optim__name": "rmsprop_warmup", "optim__rmsprop_warmup__center_epochs": 1.0,
        "optim__rmsprop_warmup__width_epochs": 1.0, "model__norm_statistics": "last",
        "checkpoint__interval_steps": 1, "checkpoint__keep": 99,
    }  # fmt: skip
    whole = run_small(tmp_path / "a", **values).summary
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    rest = run_small(tmp_path / "b", run__resume=saved, **values).summary
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert rest["top1"] == whole["top1"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"fused": "triton"}, "optim.fused"),
        ({"width_epochs": 0.0}, "optim.rmsprop_warmup.width_epochs"),
    ],
)
def test_refused_settings(values: dict[str, Any], field: str) -> None:
    with refused(field):
        OptimSettings.gather(name="rmsprop_warmup", **values)
