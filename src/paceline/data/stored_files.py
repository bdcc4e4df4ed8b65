"""`StoredFiles`: where whole files lie in memory, for libraries that are called past Python.

In: files as bytes, or views of them. Out: addresses and lengths, good as long as this lives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class StoredFiles:
    """`held` keeps them there."""

    def __init__(self, held: Sequence[bytes | memoryview]) -> None:
        views = [np.frombuffer(data, dtype=np.uint8) for data in held]
        self.held = held
        places = [view.__array_interface__["data"][0] for view in views]
        self.addresses = np.array(places, dtype=np.uint64)
        self.lengths = np.array([len(view) for view in views], dtype=np.int64)

    def pairs(self) -> list[tuple[int, int]]:
        """Address and length of each."""
        return list(zip(self.addresses.tolist(), self.lengths.tolist(), strict=True))

    def of(self, rows: Sequence[int]) -> StoredFiles:
        """Some of them."""
        return StoredFiles([self.held[row] for row in rows])
