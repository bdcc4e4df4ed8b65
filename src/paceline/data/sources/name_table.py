"""`NameTable`: very many names in one block of bytes.

In: names, one after another. Out: the i-th name. A million Python strings take over 100 MB in each
rank; their letters alone take a third of that, and nothing for the garbage collector to walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np

from paceline.data.randomness import Int64


class NameTable:
    """Immutable. Names that are not valid Unicode, as a file system may hold them, survive."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends: Int64 = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._letters = b"".join(encoded)

    @classmethod
    def from_parts(cls, ends: Int64, letters: bytes) -> Self:
        """The inverse of `parts`."""
        table = cls(())
        table._ends, table._letters = ends, letters
        return table

    @property
    def parts(self) -> tuple[Int64, bytes]:
        """Where each name ends, after a 0, and the letters of all."""
        return self._ends, self._letters

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(i)
        letters = self._letters[self._ends[i] : self._ends[i + 1]]
        return letters.decode("utf-8", "surrogateescape")
