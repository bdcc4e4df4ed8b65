"""`FileWindow`: a stretch of a file, read as if it were a file of its own.

In: an open file, where the stretch begins and how long it is. Out: a file to read and seek in; it shares
the position of the other, so only one of them is used at a time.
"""

from __future__ import annotations

import io
from typing import BinaryIO


class FileWindow(io.BytesIO):
    """A BytesIO in name only, for whoever asks for a file: it holds no bytes."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {0: 0, 1: self._at, 2: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at
