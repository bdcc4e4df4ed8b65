"""`Pieces`: parts of files that are read together.

In: descriptors, places in the files and in memory. Out: for each piece what was found: bytes read (-1: an
error), and size and time of change of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
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
            assert array.flags.c_contiguous
            assert array.shape == self.sizes.shape

    @classmethod
    def of(
        cls,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[int],
    ) -> Pieces:
        return cls(
            np.array(descriptors, dtype=np.int32),
            np.array(offsets, dtype=np.int64),
            np.array(sizes, dtype=np.int64),
            np.array(targets, dtype=np.uint64),
        )
