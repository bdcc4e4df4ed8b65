"""The fit of α + β·m."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.link_probe import fit_cost

SIZES = (4, 1024, 16384, 131072, 1 << 20)
ALPHAS = st.floats(1e-6, 1e-2)
BETAS = st.floats(1e-11, 1e-6)


@given(ALPHAS, BETAS)
def test_exact_points_give_their_line_back(alpha: float, beta: float) -> None:
    cost = fit_cost([(size, alpha + beta * size) for size in SIZES])
    assert cost.residual < 1e-6
    for size in SIZES:
        found = cost.alpha_s + cost.beta_s_per_byte * size
        assert found == pytest.approx(alpha + beta * size, rel=1e-5)


@given(ALPHAS, BETAS, st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5))
def test_noise_shows_in_the_residual_and_bounds_the_error(
    alpha: float, beta: float, noise: list[float]
) -> None:
    points = [(size, (alpha + beta * size) * n) for size, n in zip(SIZES, noise, strict=True)]
    cost = fit_cost(points)
    # The true line is off by 0.1 / 0.9 at most, and the fit is the best line there is.
    assert cost.residual <= 0.1 / 0.9 + 1e-9
    assert cost.alpha_s >= 0
    assert cost.beta_s_per_byte >= 0


def test_times_that_fall_with_size_are_a_latency() -> None:
    cost = fit_cost([(4, 3e-3), (1 << 20, 1e-3)])
    assert cost.beta_s_per_byte == 0
    assert fit_cost([(1 << 20, 1e-3), (1 << 21, 2e-3)]).alpha_s == pytest.approx(0, abs=1e-9)
