"""Ranks are not alike: how much longer than the mean the slowest of many takes.

In: a number of ranks and the spread of their times. Out: a factor on the compute time. A synchronous step
lasts as long as the slowest rank's; among N ranks with normal times that is the expected maximum of N.
"""

from __future__ import annotations

from statistics import NormalDist

# GPUs of one type and lot differ by some percent in clock and temperature, and each in itself from
# step to step. One round number for all clusters, chosen knowing the systems of the planner's record.
RANK_SPREAD = 0.02


def slowest_of(ranks: int, spread: float = RANK_SPREAD) -> float:
    """1 for one rank; Blom's approximation of the expected maximum for more."""
    if ranks <= 1:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
