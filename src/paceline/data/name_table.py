"""`NameTable`: very many names in one block of bytes.

In: names, one after another. Out: the i-th name. A million Python strings take over 100 MB in each
rank; their letters alone take a third of that, and nothing for the garbage collector to walk.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class NameTable:
    """Immutable. Names that are not valid Unicode, as a file system may hold them, survive."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._letters = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(i)
        letters = self._letters[self._ends[i] : self._ends[i + 1]]
        return letters.decode("utf-8", "surrogateescape")
