"""Chooses the algorithm for each size from measurements, and checks whether they are too noisy.

Medians count. The backend's own all-reduce is chosen unless another one is faster by a margin. The
algorithm of the next smaller size is kept if it is as good as the best one within the margin, so that
noise does not make the table alternate. So the choice is never slower than the best by more than the
margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from paceline.core.errors import RunError
from paceline.plan.schedules import NATIVE
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable

MARGIN = 0.05
# The largest spread of repeated samples (`noise`) that is accepted. Idle machines of the records, two
# cores with up to 16 ranks, have 0.07 to 0.31.
NOISE_LIMIT = 0.5


def measured_size(size_bytes: int, samples: Mapping[str, Sequence[float]]) -> MeasuredSize:
    """Returns the medians of one size, and the spread of the backend's own samples."""
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return MeasuredSize(size_bytes, medians, _spread(samples.get(NATIVE, ())))


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def noise(measured: Sequence[MeasuredSize]) -> float:
    """Returns the median spread over all sizes, so that one disturbed size does not count."""
    return statistics.median(row.spread for row in measured) if measured else 0.0


def check_noise(measured: Sequence[MeasuredSize], accept: bool) -> str:
    """Checks that samples of one size differ little enough to choose by them.

    Args:
        measured: The samples.
        accept: Return a note instead of raising an error.

    Returns:
        A note on the noise; empty if there is none.

    Raises:
        RunError: If the samples differ too much.
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
    """Returns an algorithm for each size, in ascending order of sizes."""
    chosen: list[str] = []
    for row in measured:
        chosen.append(_choose(row, chosen[-1] if chosen else None, margin))
    return chosen


def _choose(row: MeasuredSize, before: str | None, margin: float) -> str:
    """Chooses for one size; `before` is the choice for the next smaller size."""
    best = min(row.medians_s, key=lambda name: (row.medians_s[name], name))
    bound = (1 + margin) * row.medians_s[best]
    for name in (NATIVE, before):
        if name is not None and row.medians_s.get(name, math.inf) <= bound:
            return name
    return best


def table_of(measured: Sequence[MeasuredSize], chosen: Sequence[str]) -> SizeTable:
    """Returns a table that changes halfway, in factors, between two measured sizes."""
    rows: list[SizeRow] = []
    for at in range(len(measured) - 1):
        if chosen[at] != chosen[at + 1]:
            limit = math.isqrt(measured[at].size_bytes * measured[at + 1].size_bytes)
            rows.append(SizeRow(chosen[at], limit))
    return SizeTable((*rows, SizeRow(chosen[-1])))
