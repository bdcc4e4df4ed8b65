"""Chooses the all-reduce algorithm for each message size, and checks the noise of the measurements.

Algorithms are compared by their median times. The chosen one is never slower than the fastest by
more than a relative margin. Within this margin, the backend's own all-reduce is preferred, and then
the algorithm of the next smaller size, so that noise does not make the table alternate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from paceline.core.errors import RunError
from paceline.plan.schedules import NATIVE
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable

MARGIN = 0.05
# The largest accepted spread of repeated samples (`noise`). It was 0.07 to 0.31 on the idle
# machines in records/, which have two cores and ran up to 16 ranks.
NOISE_LIMIT = 0.5


def measured_size(size_bytes: int, samples: Mapping[str, Sequence[float]]) -> MeasuredSize:
    """Returns the median time of each algorithm at one size, and the spread of native samples.

    Args:
        size_bytes: The size of the buffer.
        samples: The measured seconds, by the name of the algorithm.
    """
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return MeasuredSize(size_bytes, medians, _spread(samples.get(NATIVE, ())))


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def noise(measured: Sequence[MeasuredSize]) -> float:
    """Returns the median spread over all sizes, which a single disturbed size does not change."""
    return statistics.median(row.spread for row in measured) if measured else 0.0


def check_noise(measured: Sequence[MeasuredSize], accept: bool) -> str:
    """Checks that repeated samples agree well enough to choose algorithms by them.

    Args:
        measured: The measurement of each size.
        accept: True to return a note instead of raising an error if the noise is too large.

    Returns:
        A note if the noise is too large and `accept` is True, else "".

    Raises:
        RunError: If the noise is above `NOISE_LIMIT` and `accept` is False.
    """
    spread = noise(measured)
    if spread <= NOISE_LIMIT:
        return ""
    cause = (
        f"this host is too noisy to tune on: repeated all-reduces of one size spread by {spread:.0%} "
        f"(allowed: {NOISE_LIMIT:.0%})"
    )
    if accept:
        return f"{cause}; written because of --accept-noise"
    raise RunError(
        cause, "stop other work and repeat it, or give --accept-noise to write it anyway"
    )


def choose_algorithms(measured: Sequence[MeasuredSize], margin: float = MARGIN) -> list[str]:
    """Chooses an algorithm for each measured size; `measured` must have ascending sizes."""
    chosen: list[str] = []
    for row in measured:
        chosen.append(_choose(row, chosen[-1] if chosen else None, margin))
    return chosen


def _choose(row: MeasuredSize, before: str | None, margin: float) -> str:
    """Chooses an algorithm for one size; `before` is the choice for the next smaller size."""
    best = min(row.medians_s, key=lambda name: (row.medians_s[name], name))
    bound = (1 + margin) * row.medians_s[best]
    for name in (NATIVE, before):
        if name is not None and row.medians_s.get(name, math.inf) <= bound:
            return name
    return best


def table_of(measured: Sequence[MeasuredSize], chosen: Sequence[str]) -> SizeTable:
    """Returns a table of algorithms by size from the choices at the measured sizes.

    Where two neighbouring sizes have different algorithms, the limit is their geometric mean.
    """
    rows: list[SizeRow] = []
    for at in range(len(measured) - 1):
        if chosen[at] != chosen[at + 1]:
            limit = math.isqrt(measured[at].size_bytes * measured[at + 1].size_bytes)
            rows.append(SizeRow(chosen[at], limit))
    return SizeTable((*rows, SizeRow(chosen[-1])))
