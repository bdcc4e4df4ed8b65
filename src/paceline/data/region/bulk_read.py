"""`BulkRead`: the files of several samples, read by one call.

In: a source and sample indices. Out: each one's bytes; None where an ordinary read must find out more:
data in no shard, a shard that changed or fails. One thread's: what it returned is good until its next
call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.data.decoding.preparer import Stored
from paceline.data.prefetch import Check
from paceline.data.randomness import Int64
from paceline.data.region.library import RegionLibrary, RegionUnavailableError, region_library
from paceline.data.region.pieces import Pieces
from paceline.data.sources.shard_file import Lent, ShardFile
from paceline.data.sources.source import Source

_ALIGNMENT = 64
# What is larger is read one by one: this memory is kept as long as its thread lives.
_LARGEST_FILE, _MOST_BYTES = 16 << 20, 64 << 20
# Each thread may have as many files open at once beside those that are kept open: descriptors are few.
_MOST_OPENED = 4


class BulkRead:
    """`pinned`: into memory from which a GPU reads without a copy."""

    def __init__(self, source: Source, *, pinned: bool = False) -> None:
        self._source = source
        self._extent = getattr(source, "extent", None)
        self._library = _library() if self._extent is not None else None
        self._pinned = pinned
        self._memory = np.empty(0, dtype=np.uint8)

    def all(self, indices: Sequence[int], check: Check) -> list[Stored | memoryview]:
        """What it cannot read, the source itself reads, one by one."""
        check()
        found: list[Stored | memoryview] = []
        for index, data in zip(indices, self(indices), strict=True):
            if data is None:
                check()
            found.append(self._source.read(index) if data is None else data)
        return found

    def __call__(self, indices: Sequence[int]) -> list[memoryview | None]:
        lent: dict[ShardFile, Lent | None] = {}
        try:
            return self._read(indices, lent)
        finally:
            for loan in lent.values():
                if loan is not None:
                    loan.give_back()

    def _read(
        self, indices: Sequence[int], lent: dict[ShardFile, Lent | None]
    ) -> list[memoryview | None]:
        """Notes what it borrowed in `lent`."""
        found: list[memoryview | None] = [None] * len(indices)
        wanted: list[tuple[int, Lent, int, int]] = []
        left = _MOST_BYTES
        for place, index in enumerate(indices):
            extent = self._extent(index) if self._library is not None and self._extent else None
            if extent is None:
                continue
            file, offset, size = extent
            if not 0 <= size <= min(left, _LARGEST_FILE):
                continue
            left -= size
            if file not in lent:
                opened = sum(loan is not None and loan.extra for loan in lent.values())
                lent[file] = file.lend(may_open=opened < _MOST_OPENED)
            if (loan := lent[file]) is not None:
                wanted.append((place, loan, offset, size))
        if not wanted or self._library is None:
            return found
        sizes = np.array([size for *_, size in wanted], dtype=np.int64)
        starts = self._room(sizes)
        pieces = Pieces(
            np.array([loan.descriptor for _, loan, *_ in wanted], dtype=np.int32),
            np.array([offset for *_, offset, _ in wanted], dtype=np.int64),
            sizes,
            (starts + self._memory.ctypes.data).astype(np.uint64),
        )
        self._library.read_many(pieces)
        view = self._memory.data
        rows = zip(wanted, starts.tolist(), pieces.found.tolist(), strict=True)
        for (place, loan, _, size), start, (done, *stamp) in rows:
            if done == size and loan.fits(*stamp):
                found[place] = view[start : start + size]
        return found

    def _room(self, sizes: Int64) -> Int64:
        """Where each file begins in this reader's memory, which grows to hold them."""
        ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
        if ends[-1] > len(self._memory):
            held = torch.empty(int(ends[-1]) * 5 // 4, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory = held.numpy()
        return np.concatenate(([0], ends[:-1]))


def _library() -> RegionLibrary | None:
    try:
        return region_library()
    except RegionUnavailableError:
        return None
