"""Schedule-free training: the equations, skipped steps, checkpoints, what is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optim.reference import assert_near
from paceline.core.errors import CheckpointError
from paceline.optim import SGD
from paceline.train.batch_norm import BatchNormState
from paceline.train.weights import ScheduleFree, create_average
from small_runs import run_small
from train.runs import last, stop_after

FREE: dict[str, Any] = {
    "optim__schedule_free": 0.9, "optim__schedule": "constant", "optim__momentum": 0.0,
}  # fmt: skip
RATES = (0.05, 0.1, 0.1, 0.2, 0.1)


def made(kind: torch.dtype = torch.float32) -> tuple[nn.Linear, SGD, ScheduleFree]:
    torch.manual_seed(0)
    net = nn.Linear(5, 3, bias=False).to(kind)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.0, fused=False)
    average = create_average(0, 1, net, optimizer, BatchNormState(net), 0.9)
    assert isinstance(average, ScheduleFree)
    return net, optimizer, average


def step(
    net: nn.Linear, optimizer: SGD, average: ScheduleFree, rate: float, seed: int
) -> np.ndarray:
    """A step with a gradient that depends on the weights, as a trained net's does."""
    draw = torch.Generator().manual_seed(seed)
    pull = torch.randn(3, 5, generator=draw)
    net.weight.grad = (net.weight.detach().float() + pull).to(net.weight.dtype)
    optimizer.param_groups[0]["lr"] = rate
    average.set_rate(rate)
    optimizer.step()
    average.add(optimizer.overflow)
    return pull.double().numpy()


def test_the_equations() -> None:
    net, optimizer, average = made()
    x = z = y = net.weight.detach().double().numpy().copy()
    total = 0.0
    for number, rate in enumerate(RATES):
        pull = step(net, optimizer, average, rate, number)
        z = z - rate * (y + pull)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        y = 0.1 * z + 0.9 * x
    assert_near(net.weight, torch.from_numpy(y))
    assert_near(average.weights[0], torch.from_numpy(x))
    assert_near(average.base[0], torch.from_numpy(z))
    with average.applied():
        assert_near(net.weight, torch.from_numpy(x))
    assert_near(net.weight, torch.from_numpy(y))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_skipped_step_leaves_all_as_they_are(kind: torch.dtype) -> None:
    net, optimizer, average = made(kind)
    for number, rate in enumerate(RATES):
        step(net, optimizer, average, rate, number)
    (master,) = optimizer.masters()
    assert torch.equal(net.weight.detach(), master.detach().to(kind))
    held = [t.detach().clone() for t in (net.weight, master, *average.weights, *average.base)]
    net.weight.grad = torch.full_like(net.weight, float("nan"))
    optimizer.step()
    average.add(optimizer.overflow)
    now = (net.weight, master, *average.weights, *average.base)
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))
    step(net, optimizer, average, 0.1, 9)
    assert not torch.equal(held[0], net.weight)


def test_runs_resume_to_the_bit_and_evaluate_the_average(tmp_path: Path) -> None:
    values = FREE | {"precision__amp_dtype": "bf16"}
    whole = run_small(tmp_path / "whole", **values).summary
    assert whole["chosen"]["average"].startswith("schedule-free")
    assert whole["average_sha256"] != whole["weights_sha256"]
    stop_after(3, tmp_path / "cut", **values)
    assert last(tmp_path / "cut").average["base"]
    again = run_small(tmp_path / "cut", run__resume="auto", **values).summary
    for name in ("weights_sha256", "average_sha256", "top1"):
        assert again[name] == whole[name]


def test_an_average_of_another_kind_is_refused(tmp_path: Path) -> None:
    plain = {"optim__schedule": "constant", "run__average_epochs": 1.0}
    stop_after(3, tmp_path / "cut", **plain)
    with pytest.raises(CheckpointError, match="schedule_free"):
        run_small(tmp_path / "cut", run__resume="auto", **FREE)
