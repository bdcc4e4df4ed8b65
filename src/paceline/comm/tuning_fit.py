"""`LinkCost`: what a message of m bytes costs between two ranks, α + β·m.

In: pairs of (bytes, seconds), as measured. Out: α, β and the residual of the fit. Errors count relative
to the time, so that small messages weigh as much as large ones. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkCost:
    """`residual` is the root mean square of the fit's relative errors: 0.1 is 10 %."""

    alpha_s: float
    beta_s_per_byte: float
    residual: float

    def seconds(self, size_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size_bytes

    @property
    def mbit_per_s(self) -> float:
        """The bandwidth; infinite where size made no difference."""
        return 8e-6 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf


def fit_cost(points: Sequence[tuple[int, float]]) -> LinkCost:
    """Least squares of (α + β·m − t) / t over the points; neither α nor β becomes negative."""
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ValueError("a fit needs points with a time above 0")
    candidates = [
        cost
        for cost in (_both(points), _alpha_only(points), _beta_only(points))
        if cost is not None
    ]
    alpha, beta = min(candidates, key=lambda cost: _residual(points, *cost))
    return LinkCost(alpha, beta, _residual(points, alpha, beta))


def _both(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """The unbounded optimum, if it is one that a link can have."""
    largest = max(size for size, _ in points) or 1
    a = b = c = d = e = 0.0
    for size, seconds in points:
        x, y = 1 / seconds, (size / largest) / seconds
        a, b, c, d, e = a + x * x, b + x * y, c + y * y, d + x, e + y
    determinant = a * c - b * b
    if determinant <= 1e-12 * a * c:
        return None
    alpha, beta = (d * c - e * b) / determinant, (a * e - b * d) / determinant
    return (alpha, beta / largest) if alpha >= 0 and beta >= 0 else None


def _alpha_only(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    weights = [1 / seconds for _, seconds in points]
    return sum(weights) / sum(weight * weight for weight in weights), 0.0


def _beta_only(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    shares = [size / seconds for size, seconds in points]
    square = sum(share * share for share in shares)
    return (0.0, sum(shares) / square) if square else None


def _residual(points: Sequence[tuple[int, float]], alpha: float, beta: float) -> float:
    errors = [(alpha + beta * size - seconds) / seconds for size, seconds in points]
    return math.sqrt(sum(error * error for error in errors) / len(errors))
