"""Chooses the all-reduce algorithm for each message size and the size of buckets, from measured times.

Algorithms are compared by their median times. The chosen one is never slower than the fastest by
more than a relative margin. Within this margin, the backend's own all-reduce is preferred, and then
the algorithm of the next smaller size, so that noise does not make the table alternate. All functions
are pure, so that equal measurements give equal choices.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.errors import RunError
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.schedules import NATIVE
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable

MARGIN = 0.05
# Measured times say nothing about messages that are more than this many times as large.
_FURTHEST = 32
# The bucket sizes in bytes that `choose_bucket_bytes` compares, and how much longer than with the largest
# of them the exchange may take.
BUCKET_BYTES = (4 << 20, 8 << 20, 16 << 20)
_BUCKET_MARGIN = 0.03
# The largest accepted spread of repeated samples (`noise`). It was 0.07 to 0.31 on the idle
# machines in records/, which have two cores and ran up to 16 ranks.
NOISE_LIMIT = 0.5


def measured_size(size_bytes: int, samples: Mapping[str, Sequence[float]]) -> MeasuredSize:
    """Returns the median time of each algorithm at one buffer size, and the spread for `native`.

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
    """Returns the spread of repeated measurements: the median over all sizes, robust to one bad size."""
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
    """Chooses an algorithm for one buffer size; `before` is that of the next smaller size."""
    best = min(row.medians_s, key=lambda name: (row.medians_s[name], name))
    bound = (1 + margin) * row.medians_s[best]
    for name in (NATIVE, before):
        if name is not None and row.medians_s.get(name, math.inf) <= bound:
            return name
    return best


def table_of(measured: Sequence[MeasuredSize], chosen: Sequence[str]) -> SizeTable:
    """Builds a `SizeTable` from the algorithms that were chosen for the measured buffer sizes.

    If two neighboring sizes have different algorithms, the table changes the algorithm at the
    geometric mean of the two sizes.
    """
    rows: list[SizeRow] = []
    for at in range(len(measured) - 1):
        if chosen[at] != chosen[at + 1]:
            limit = math.isqrt(measured[at].size_bytes * measured[at + 1].size_bytes)
            rows.append(SizeRow(chosen[at], limit))
    return SizeTable((*rows, SizeRow(chosen[-1])))


def careful_table(measured: Sequence[MeasuredSize], margin: float) -> SizeTable:
    """Returns a table of algorithms by size, with the backend's own one far above the measured sizes.

    Args:
        measured: The measurement of each size, in ascending order.
        margin: By how much another algorithm must be faster than the backend's own.
    """
    table = table_of(measured, choose_algorithms(measured, margin))
    last = table.rows[-1].algorithm
    if last == NATIVE:
        return table
    limit = _FURTHEST * measured[-1].size_bytes
    return SizeTable((*table.rows[:-1], SizeRow(last, limit), SizeRow(NATIVE)))


def choose_bucket_bytes(
    gradients: Sequence[tuple[str, int]], table: SizeTable, measured: Sequence[MeasuredSize]
) -> int:
    """Chooses the size at which a bucket is closed.

    This is the smallest size with which all buckets together take about as long as with the largest
    size, if that was measured. Small buckets start earlier, and less is left to send after the backward
    pass.

    Args:
        gradients: Name and bytes of each gradient, in the order in which they become ready.
        table: The algorithm for each size.
        measured: The measured sizes, in ascending order.
    """
    default = BUCKET_BYTES[-1]
    points = [(row.size_bytes, row.medians_s.get(table.choose(row.size_bytes))) for row in measured]
    known = [(size, seconds) for size, seconds in points if seconds is not None]
    fits = sum(size for _, size in gradients) <= default
    if fits or len(known) < 2 or known[-1][0] < default or table.choose(default) == NATIVE:
        return default
    totals = {size: _total_s(gradients, size, known) for size in BUCKET_BYTES}
    return min(size for size in totals if totals[size] <= (1 + _BUCKET_MARGIN) * totals[default])


def _total_s(
    gradients: Sequence[tuple[str, int]], threshold: int, points: Sequence[tuple[int, float]]
) -> float:
    """Returns the predicted seconds of all buckets, one after the other."""
    bytes_of = dict(gradients)
    pools = FusionPlan.by_threshold(gradients, threshold).buckets
    sizes = np.array([sum(bytes_of[name] for name in pool.tensors) for pool in pools], dtype=float)
    known, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    # Above the largest measured size, the time grows as between the two largest ones.
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
    beyond = np.maximum(sizes - known[-1], 0.0) * slope
    return float((np.interp(sizes, known, seconds) + beyond).sum())
