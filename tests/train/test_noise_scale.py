"""The noise scale of a run: what the ranks' and micro-steps' gradients say of its batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_runs import events
from paceline.comm import GradientExchange, Signals
from paceline.plan.noise import NoiseEstimate, NoiseScale
from ranks import run_ranks
from small_runs import run_on_ranks, run_small
from train.runs import last, stop_after
from train.steps import alone, joined

MICRO: dict[str, Any] = {"run__noise_scale": True, "run__batch_size": 4}


def _regression(rank: int, ranks: int, micro: int, alone_: bool) -> list[tuple[float, float]]:
    """(whole, parts) of 20 steps of least squares y = x·w* + ε at w = 0, where the noise scale is
    known; each rank and micro-step has 4 samples of its own."""
    weight = torch.nn.Parameter(torch.zeros(6))
    group = alone() if alone_ else None
    with joined() if group is None else group as group:
        exchange = GradientExchange([("w", weight)], group, accumulate=micro > 1, squares=True)
        draw = np.random.default_rng(3)
        found, samples = [], 4 * micro * ranks
        for step in range(20):
            x = torch.tensor(draw.normal(size=(samples, 6)), dtype=torch.float32)
            y = x.sum(1) + torch.tensor(draw.normal(size=samples), dtype=torch.float32)
            exchange.begin(step)
            for turn in range(micro):
                at = 4 * (rank + turn * ranks)
                loss = (x[at : at + 4] @ weight - y[at : at + 4]).square().sum() / (2 * samples)
                loss.backward()
                exchange.gather()
            exchange.reduce(loss.detach(), Signals())
            assert exchange.uses.tolist() == [ranks]
            found.append((float(weight.grad.double().square().sum()), float(exchange.squares)))
    return found


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 4), (4, 1)])
def test_sums_equal_numpys_and_give_the_known_scale(ranks: int, micro: int) -> None:
    samples = 4 * micro * ranks
    if ranks == 1:
        found = _regression(0, 1, micro, True)
    else:
        first, *others = run_ranks(ranks, _regression, ranks, micro, False)
        assert all(other == first for other in others)
        found = first
    draw, scale = np.random.default_rng(3), NoiseScale()
    for whole, parts in found:
        x = draw.normal(size=(samples, 6))
        y = x.sum(1) + draw.normal(size=samples)
        gradients = -x * y[:, None] / samples
        blocks = gradients.reshape(-1, 4, 6).sum(1)
        assert whole == pytest.approx(float((gradients.sum(0) ** 2).sum()), rel=1e-5)
        assert parts == pytest.approx(float((blocks**2).sum()), rel=1e-5)
        estimate = NoiseEstimate.of(whole, parts, samples, micro * ranks)
        scale.add(estimate)
    # |w*|² = 6, tr Σ = 6·(6 + 1) + 6 = 48: 8 samples; 20 steps scatter.
    assert scale.value == pytest.approx(8, rel=0.5)


def test_ranks_see_what_one_process_with_micro_steps_sees(tmp_path: Path) -> None:
    plain = run_small(tmp_path / "plain", run__batch_size=4).summary
    one = run_small(tmp_path / "one", **MICRO).summary
    assert one["weights_sha256"] == plain["weights_sha256"], "measuring changes no bit"
    assert plain["noise_scale"] is None
    assert "noise_scale" in events(tmp_path / "plain", "step")[0]
    two = run_on_ranks(2, tmp_path / "two", MICRO)[0]
    for a, b in zip(
        events(tmp_path / "one", "step"), events(tmp_path / "two", "step"), strict=True
    ):
        for name in ("grad_signal", "grad_variance"):
            assert b[name] == pytest.approx(a[name], rel=1e-2, abs=1e-3)
    assert "4 micro-batches of 4" in one["chosen"]["noise scale"]
    assert two["noise_scale"] == pytest.approx(one["noise_scale"], rel=0.05)
    # The average follows from the records.
    scale = NoiseScale()
    for event in events(tmp_path / "one", "step"):
        scale.add(NoiseEstimate(event["grad_signal"], event["grad_variance"]))
        assert event["noise_scale"] == pytest.approx(scale.value)
    assert one["noise_scale"] == pytest.approx(scale.value)


def test_a_resumed_run_continues_its_average(tmp_path: Path) -> None:
    whole = run_small(tmp_path / "whole", **MICRO).summary
    stop_after(3, tmp_path / "cut", **MICRO)
    assert last(tmp_path / "cut").progress["noise"][2] > 0
    rest = run_small(tmp_path / "cut", run__resume="auto", **MICRO).summary
    assert rest["noise_scale"] == whole["noise_scale"]


@pytest.mark.gpu
def test_captured_steps_measure_what_plain_ones_do(tmp_path: Path) -> None:
    found = {}
    for graphs in ("on", "off"):
        values = MICRO | {"run__device": "cuda", "run__cuda_graphs": graphs, "data__image_size": 28}
        run_small(tmp_path / graphs, precision__amp_dtype="fp16", **values)
        found[graphs] = events(tmp_path / graphs, "step")
    for a, b in zip(found["on"], found["off"], strict=True):
        for name in ("grad_signal", "grad_variance"):
            assert a[name] == pytest.approx(b[name], rel=0.1, abs=1e-3)
