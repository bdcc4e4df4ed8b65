"""`Pieces`: parts of files that are read together.

In: descriptors, places in the files and in memory. Out: for each piece what was found: bytes read (-1: an
error), and size and time of change of its file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.data.randomness import Int64


@dataclass
class Pieces:
    """`targets` are addresses; the memory there must be as long as `sizes` say."""

    descriptors: npt.NDArray[np.int32]
    offsets: Int64
    sizes: Int64
    targets: npt.NDArray[np.uint64]
    found: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.found = np.full((len(self.sizes), 3), -1, dtype=np.int64)
        for array in (self.descriptors, self.offsets, self.sizes, self.targets):
            if not array.flags.c_contiguous or array.shape != self.sizes.shape:
                raise ValueError(f"pieces of unequal arrays: {array.shape}, {self.sizes.shape}")
        if (self.offsets < 0).any() or (self.sizes < 0).any():
            raise ValueError("a piece of negative offset or size")
