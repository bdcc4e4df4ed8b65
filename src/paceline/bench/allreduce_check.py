"""`Pattern`: numbers whose sum over ranks is known, and exact in the wire format.

In: a buffer. Out: the same, filled; after the all-reduce an error on every rank if any rank has another
number than it should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.bench.rank_group import RankGroup
from paceline.comm.wire import WireFormat
from paceline.core.errors import CommError

_PERIOD = 3


class Pattern:
    """Element i on rank r is (i + r) mod 3."""

    def __init__(
        self, length: int, rank: int, world_size: int, wire: str, device: torch.device
    ) -> None:
        self._own = (torch.arange(length, device=device) + rank) % _PERIOD
        at = torch.arange(length, device=device) % _PERIOD
        sums = [sum((n + r) % _PERIOD for r in range(world_size)) for n in range(_PERIOD)]
        self._sum = torch.tensor(sums, dtype=torch.float32, device=device)[at]
        self._ones = float(world_size)
        # Whole numbers are exact up to 1 / (2 · unit roundoff); beyond, each rank may round once.
        unit = WireFormat.named(wire).unit_roundoff
        most = 2.0 * world_size
        self._tolerance = 0.0 if most * unit <= 0.5 else most * unit * world_size

    def fill(self, buffer: Tensor) -> None:
        buffer.copy_(self._own)

    def check(self, buffer: Tensor, name: str, ranks: RankGroup) -> None:
        """Every element; all ranks learn of one that is wrong."""
        wrong = int(((buffer - self._sum).abs() > self._tolerance).sum())
        if ranks.agree_max(float(wrong)) > 0:
            raise CommError(
                f"{name} all-reduce of {buffer.nbytes} bytes is wrong: {wrong} elements on rank "
                f"{ranks.rank}",
                "please report this with the command line",
            )

    def check_ends(self, buffer: Tensor, name: str) -> None:
        """First and last element of a buffer that held ones."""
        for value in (float(buffer[0]), float(buffer[-1])):
            if abs(value - self._ones) > self._tolerance:
                raise CommError(
                    f"{name} all-reduce of {buffer.nbytes} bytes gave {value}, not {self._ones:g}",
                    "please report this with the command line",
                )
