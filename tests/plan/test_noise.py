"""The noise scale: unbiased estimators, running averages, and the batches that they suggest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from paceline.plan.noise import (
    LEAST_SAVING,
    NoiseEstimate,
    NoiseScale,
    concentration,
    relative_steps,
    time_saved,
    useful_batch,
)


class Regression:
    """Least squares y = x·w* + ε at w = 0 with x ~ N(0, I), ε ~ N(0, s²): the mean gradient is −w* and
    a sample's, −x·y, has covariance (|w*|² + s²)·I + w*w*ᵀ."""

    def __init__(self, dimensions: int, noise: float) -> None:
        draw = np.random.default_rng(5)
        self.truth = draw.normal(size=dimensions)
        self.noise = noise
        self.signal = float(self.truth @ self.truth)
        self.variance = dimensions * (self.signal + noise**2) + self.signal

    def gradients(self, samples: int, draw: np.random.Generator) -> np.ndarray:
        x = draw.normal(size=(samples, len(self.truth)))
        y = x @ self.truth + self.noise * draw.normal(size=samples)
        return -x * y[:, None]


@pytest.mark.parametrize(("samples", "parts"), [(64, 8), (50, 7), (9, 2)])
def test_estimates_have_no_bias_also_for_unequal_parts(samples: int, parts: int) -> None:
    problem, draw = Regression(6, 0.5), np.random.default_rng(1)
    bounds = [j * samples // parts for j in range(parts + 1)]
    signals, variances = [], []
    for _ in range(4000):
        gradients = problem.gradients(samples, draw) / samples
        shares = [gradients[a:b].sum(0) for a, b in itertools.pairwise(bounds)]
        whole, squares = gradients.sum(0), sum(float(g @ g) for g in shares)
        estimate = NoiseEstimate.of(float(whole @ whole), squares, samples, parts)
        signals.append(estimate.signal)
        variances.append(estimate.variance)
    for found, expected in ((signals, problem.signal), (variances, problem.variance)):
        error = np.std(found) / math.sqrt(len(found))
        assert abs(np.mean(found) - expected) < 4 * error
        assert 4 * error < 0.2 * expected, "the test could not see a bias"


def test_parts_of_a_short_step_differ_by_one() -> None:
    assert concentration(10, 1) == 1
    assert concentration(12, 4) == 0.25
    assert concentration(10, 3) == pytest.approx((3**2 + 3**2 + 4**2) / 100)
    for samples, parts in ((3, 4), (3, 0), (0, 0)):
        with pytest.raises(ValueError, match="parts"):
            concentration(samples, parts)


@pytest.mark.parametrize(
    ("whole", "parts", "count"), [(1.0, 1.0, 1), (math.inf, 1.0, 2), (1.0, math.nan, 2)]
)
def test_one_part_or_an_overflow_give_no_estimate(whole: float, parts: float, count: int) -> None:
    assert NoiseEstimate.of(whole, parts, 8, count) is None


def test_averages_start_at_the_first_estimate_and_hide_nothing() -> None:
    scale = NoiseScale()
    assert scale.value is None
    scale.add(NoiseEstimate(2.0, 30.0))
    assert scale.value == pytest.approx(15.0)
    scale.add(NoiseEstimate(-1.0, 30.0))  # a single step may be below 0
    assert scale.value == pytest.approx(30.0 / ((0.98 * 2 - 1) / 1.98))
    hidden = NoiseScale()
    hidden.add(NoiseEstimate(-1.0, 30.0))
    assert hidden.value is None


def test_steps_and_time() -> None:
    assert relative_steps(1000, 1000) == 2
    assert time_saved(1000, 1000, 2000) == pytest.approx(0.25)


def test_the_useful_batch_is_where_doubling_saves_just_enough() -> None:
    batch = useful_batch(700)
    assert time_saved(700, batch, 2 * batch) == pytest.approx(LEAST_SAVING)
    assert time_saved(700, batch / 2, batch) > LEAST_SAVING
    assert time_saved(700, 2 * batch, 4 * batch) < LEAST_SAVING
