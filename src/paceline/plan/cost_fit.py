"""Costs as they were measured: what an all-reduce takes on clusters like those that were probed.

In: samples (place, algorithm, bytes, seconds). Out: prices: of a call, of an end of a message and of a
byte, between nodes and inside them. All but the prices follows from the algorithm: its messages are
played one by one, on the cores and links that they share. So what was measured on some sizes, ranks and
links predicts others. Each algorithm has prices of its own, because a byte costs less where few flow at
once. They are never negative, and fitted to relative errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.plan.rank_rounds import Message
from paceline.plan.rank_scripts import scripts
from paceline.plan.script_player import Place, Prices, play

Floats = npt.NDArray[np.float64]
# From what order of magnitude on the search begins: a few system calls, some memory traffic.
_FIRST = Prices(5e-4, 1e-4, 5e-5, 1e-8, 3e-9)
_ROUNDS = 12
_NUDGE = 0.05


@dataclass(frozen=True)
class Sample:
    place: Place
    algorithm: str
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class FittedCosts:
    """`prices` by algorithm; `spread` is the relative root mean square of what the fit missed."""

    prices: dict[str, Prices]
    spread: float

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> FittedCosts:
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            if not (sample.seconds > 0 and math.isfinite(sample.seconds)):
                raise ConfigError("seconds", sample.seconds, "must be above 0", "measure it again")
            if not (sample.size_bytes > 0 and math.isfinite(sample.size_bytes)):
                raise ConfigError("size_bytes", sample.size_bytes, "must be above 0",
                                  "leave out what sends nothing")  # fmt: skip
            if sample.place.ranks < 2:
                raise ConfigError("place.ranks", sample.place.ranks, "must be 2 or more",
                                  "leave out what was measured on one rank")  # fmt: skip
            by_name.setdefault(sample.algorithm, []).append(sample)
        if not by_name:
            raise ConfigError(
                "samples", None, "none given", "measure with paceline bench allreduce"
            )
        prices, missed = {}, []
        for name, rows in by_name.items():
            prices[name], away = _fit(rows)
            missed.append(away)
        return cls(prices, float(np.sqrt(np.mean(np.concatenate(missed) ** 2))))

    def seconds(self, algorithm: str, place: Place, sizes: npt.ArrayLike) -> Floats:
        if algorithm not in self.prices:
            raise ConfigError(
                "algorithm", algorithm, "was not measured", nearest(algorithm, tuple(self.prices))
            )
        m = np.asarray(sizes, dtype=np.float64)
        found = [_seconds(algorithm, place, size, self.prices[algorithm]) for size in m.ravel()]
        return np.array(found).reshape(m.shape)


def _seconds(algorithm: str, place: Place, size_bytes: float, prices: Prices) -> float:
    if size_bytes <= 0 or place.ranks == 1:
        return 0.0
    made = _scripts(algorithm, place.nodes, place.ranks_per_node, math.ceil(size_bytes))
    return play(made, place, prices)


@lru_cache(maxsize=1024)
def _scripts(algorithm: str, nodes: int, ranks: int, size_bytes: int) -> list[list[Message]]:
    return scripts(algorithm, nodes, ranks, size_bytes)


def _fit(samples: Sequence[Sample]) -> tuple[Prices, Floats]:
    """The prices, and the relative error that each sample is left with."""
    logs = np.log([sample.seconds for sample in samples])

    def errors(x: Floats) -> Floats:
        prices = Prices(*(float(value) for value in np.exp(x)))
        found = [_seconds(s.algorithm, s.place, s.size_bytes, prices) for s in samples]
        return np.asarray(np.log(found) - logs)

    best, away = _least_squares(errors, np.log(astuple(_FIRST)))
    return Prices(*(float(value) for value in np.exp(best))), np.expm1(away)


def _least_squares(errors: Callable[[Floats], Floats], x: Floats) -> tuple[Floats, Floats]:
    """Gauss and Newton's, damped (Levenberg and Marquardt): a step is taken where it helps."""
    away, damping = errors(x), 1e-2
    for _ in range(_ROUNDS):
        nudged = [errors(x + _NUDGE * unit) for unit in np.eye(len(x))]
        slope = np.stack([(one - away) / _NUDGE for one in nudged], axis=1)
        while damping < 1e4:
            normal = slope.T @ slope + damping * np.eye(len(x))
            step = np.clip(np.linalg.solve(normal, -slope.T @ away), -1.0, 1.0)
            now = errors(x + step)
            if now @ now < away @ away:
                break
            damping *= 5
        else:
            break
        gain = 1 - (now @ now) / (away @ away)
        x, away, damping = x + step, now, max(damping / 5, 1e-4)
        if gain < 1e-4 or away @ away < 1e-18:
            break
    return x, away
