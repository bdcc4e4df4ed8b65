"""`paceline lr-find`: the test itself, its suggestion and files, and wrong input."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

from cli_runs import IMAGES, SYNTHETIC, run
from paceline.cli.lr_find import range_chart
from paceline.core.errors import RunError
from paceline.tune.range_test import RangeResult, smooth

LR_FIND = ["lr-find", *SYNTHETIC, *IMAGES[:18], "--device", "cpu", "--global-batch-size", "16"]


def test_smoothing_is_the_unbiased_moving_average() -> None:
    losses = np.random.default_rng(0).random(30)
    found = smooth(losses.tolist())
    for n in range(1, 31):
        weights = 0.9 ** np.arange(n)[::-1]
        assert found[n - 1] == pytest.approx(float(weights @ losses[:n] / weights.sum()))


def test_the_suggestion_is_the_steepest_descent_before_the_lowest_loss() -> None:
    rates = np.geomspace(1e-4, 10, 200)
    powers = np.log10(rates)
    # Falls around 10⁻², is lowest near 10⁻¹, explodes past it.
    losses = 2 - 1 / (1 + np.exp(-4 * (powers + 2))) + np.exp(3 * (powers - 0.2))
    result = RangeResult.of(rates.tolist(), losses.tolist(), exploded=True)
    assert -2.2 < math.log10(result.suggested) < -1.2, "the smoothed loss lags behind"
    assert result.suggested < result.largest < 1
    assert math.isfinite(result.fall)
    with pytest.raises(RunError):
        RangeResult.of([0.1] * 3, [1.0] * 3, exploded=True)


def test_an_early_descent_of_a_short_test_is_found() -> None:
    losses = [2.3, 2.1, 1.8, 1.5, 1.3, 1.2, 1.1, 1.0, 1.05, 1.1, 1.3, 1.7, 2.5, 4, 8]
    rates = np.geomspace(1e-4, 10, 15).tolist()
    found = RangeResult.of(rates, losses, exploded=True)
    assert found.suggested < found.largest
    # Losses that only rise, noisy or not, have no descent.
    for rising in (sorted(losses), [2 + 0.1 * n + 0.05 * (-1) ** n for n in range(15)]):
        assert RangeResult.of(rates, rising, exploded=True).suggested is None


@pytest.mark.parametrize("steps", [10, 20, 100, 1000])
def test_noise_is_no_descent(steps: int) -> None:
    rates = np.geomspace(1e-4, 10, steps).tolist()
    draws = [2 + np.random.default_rng(seed).normal(size=steps) for seed in range(200)]
    found = [RangeResult.of(rates, losses.tolist(), exploded=False) for losses in draws]
    assert sum(result.suggested is not None for result in found) <= 4, "two of a hundred"
    flat = RangeResult.of(rates, [2.0] * steps, exploded=False)
    assert flat.suggested is None
    assert flat.fall < 1e-3
    assert "no clear descent" in range_chart(flat).note


@pytest.mark.parametrize("steps", [20, 100, 1000])
def test_a_descent_in_noise_is_found(steps: int) -> None:
    """A fall by four standard deviations of the noise."""
    rates = np.geomspace(1e-4, 10, steps).tolist()
    draws = [2 + np.random.default_rng(seed).normal(size=steps) for seed in range(200)]
    falls = 4 / (1 + np.exp(-2 * np.linspace(-6, 6, steps)))
    falling = [losses - falls for losses in draws]
    found = [RangeResult.of(rates, losses.tolist(), exploded=False) for losses in falling]
    assert sum(result.suggested is None for result in found) <= (10 if steps == 20 else 1)


def test_a_range_test_of_a_run(tmp_path: Path) -> None:
    flags = ["--steps", "40", "--global-batch-size", "50", "--from", "1e-4", "--to", "100"]
    done = run([*LR_FIND, *flags, "--json", "--output", "r"], tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    rates = np.array(found["lr"])
    steps = len(rates)
    assert 20 <= steps <= 40
    assert rates == pytest.approx(np.geomspace(1e-4, 100, 40)[:steps])
    assert 1e-4 <= found["suggested_lr"] <= found["largest_lr"] < 100
    assert "Learning-rate range test" in (tmp_path / "r/lr_find.html").read_text()


def test_the_flags_of_train_are_taken(tmp_path: Path) -> None:
    flags = ["--smoothing", "0.2", "--momentum", "0.5", "--weight-decay", "0.01", "--seed", "3"]
    done = run([*LR_FIND, *flags, "--steps", "20", "--output", "r"], tmp_path)
    assert done.code == 0, done.err
    config = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert config["run"]["smoothing"] == 0.2
    assert config["optim"]["momentum"] == 0.5
    assert config["optim"]["weight_decay"] == 0.01
    assert config["run"]["seed"] == 3
    done = run(["eval", "r", "--device", "cpu"], tmp_path)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--from", "1", "--to", "0.1"], "--from"),
        (["--steps", "5"], "--steps"),
        (["--set", "run.resume=auto"], "run.resume"),
        (["--nproc-per-node", "0"], "--nproc-per-node"),
    ],
)
def test_wrong_input(tmp_path: Path, flags: list[str], named: str) -> None:
    done = run([*LR_FIND, *flags], tmp_path)
    assert named in done.error_line()
    assert done.code == 2
