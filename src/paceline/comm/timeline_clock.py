"""Clocks of several hosts, laid over one another.

In: when each rank entered and left a few tiny all-reduces, by its own clock. Out: for each rank the
offset of its clock to rank 0's, and how far the truth may be away. No rank leaves an all-reduce before
all have entered it, so with o the offset of rank r's clock: enter_r − leave_0 ≤ o ≤ leave_r − enter_0.
The narrowest such bounds of all rounds hold; their middle is the estimate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm.group import Group

ROUNDS = 20


class ClockOffset(NamedTuple):
    """Subtract `offset_s` from the rank's clock; the truth is within ± `residual_s`."""

    offset_s: float
    residual_s: float


def measure_offsets(group: Group) -> list[ClockOffset] | None:
    """One for each rank, on rank 0; None elsewhere. All ranks call this."""
    tick, times = torch.zeros(1, device=group.device), []
    for _ in range(ROUNDS):
        times.append(time.perf_counter())
        group.all_reduce_sum(tick)
        float(tick)  # on a GPU only the queueing is over
        times.append(time.perf_counter())
    rows = group.gather(torch.tensor(times, dtype=torch.float64, device=group.device))
    return None if rows is None else clock_offsets(rows.tolist())


def clock_offsets(rows: Sequence[Sequence[float]]) -> list[ClockOffset]:
    """`rows`: for each rank enter, leave, enter, leave, … of the same rounds."""
    enters, leaves = [row[0::2] for row in rows], [row[1::2] for row in rows]
    found = []
    for enter, leave in zip(enters, leaves, strict=True):
        low = max(mine - first for mine, first in zip(enter, leaves[0], strict=True))
        high = min(mine - first for mine, first in zip(leave, enters[0], strict=True))
        # A clock that was set in between can cross the bounds.
        found.append(ClockOffset((low + high) / 2, abs(high - low) / 2))
    return [ClockOffset(0.0, 0.0), *found[1:]]
