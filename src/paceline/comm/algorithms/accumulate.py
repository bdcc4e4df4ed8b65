"""Sums of what arrived, in fp32 where the messages are 16 bits wide.

In: this rank's own stretch, and arrivals that are waited for one by one. Out: their sum in the stretch,
rounded once. For a single arrival fp32 memory gains nothing: torch adds two 16-bit numbers in fp32 and
rounds once anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.comm.algorithms.lane import Lane


def is_half(tensor: Tensor) -> bool:
    return tensor.element_size() == 2


def add_arrivals(own: Tensor, arrivals: Iterator[Tensor], count: int, lane: Lane) -> None:
    """own ← own + the `count` arrivals, each added as soon as it is there."""
    if count < 2 or not is_half(own):
        for arrival in arrivals:
            own.add_(arrival)
        return
    total = lane.scratch("sum", own.numel(), own, torch.float32)
    wide = lane.scratch("wide", own.numel(), own, torch.float32)
    total.copy_(own)
    for arrival in arrivals:
        # Not total.add_(arrival): over mixed formats torch's CPU loop is not vectorised, 2.5 × as slow.
        total.add_(wide.copy_(arrival))
    own.copy_(total)
