"""`BulkRead`: the files of a chunk, read by one call.

In: a source and sample indices. Out: each one's bytes, in memory from which a GPU reads without a copy;
or what the source itself reads, where that cannot be: no C library, data in no shard, a shard that
changed or fails. One thread's: what it returned is good until its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.on_device.jpeg_facts import Bytes
from paceline.data.prefetch import Check
from paceline.data.randomness import Int64
from paceline.data.region.library import RegionLibrary, RegionUnavailableError, region_library
from paceline.data.region.pieces import Pieces
from paceline.data.sources.shard_file import Lent, ShardFile
from paceline.data.sources.source import Source

Read = Bytes | Any
_ALIGNMENT = 64


class BulkRead:
    def __init__(self, source: Source, device: torch.device) -> None:
        self._source = source
        self._extent = getattr(source, "extent", None)
        self._library = _library() if self._extent is not None else None
        self._pinned = device.type == "cuda"
        self._memory = np.empty(0, dtype=np.uint8)

    def __call__(self, indices: Sequence[int], check: Check) -> list[Read]:
        found: list[Read] = [None] * len(indices)
        if self._library is not None:
            check()
            self._read_together(self._library, indices, found)
        for place, index in enumerate(indices):
            if found[place] is None:
                check()
                found[place] = self._source.read(index)
        return found

    def _read_together(
        self, library: RegionLibrary, indices: Sequence[int], found: list[Read]
    ) -> None:
        """Leaves None what an ordinary read must find out about."""
        lent: dict[ShardFile, Lent | None] = {}
        try:
            wanted: list[tuple[int, Lent, int, int]] = []
            for place, index in enumerate(indices):
                extent = self._extent(index) if self._extent is not None else None
                if extent is None:
                    continue
                file, offset, size = extent
                if file not in lent:
                    lent[file] = file.lend()
                if (loan := lent[file]) is not None:
                    wanted.append((place, loan, offset, size))
            if not wanted:
                return
            sizes = np.array([size for *_, size in wanted], dtype=np.int64)
            starts = self._room(sizes)
            pieces = Pieces(
                np.array([loan.descriptor for _, loan, *_ in wanted], dtype=np.int32),
                np.array([offset for *_, offset, _ in wanted], dtype=np.int64),
                sizes,
                (starts + self._memory.ctypes.data).astype(np.uint64),
            )
            library.read_many(pieces)
            view = self._memory.data
            rows = zip(wanted, starts.tolist(), pieces.found.tolist(), strict=True)
            for (place, loan, _, size), start, (done, *stamp) in rows:
                if done == size and loan.fits(*stamp):
                    found[place] = view[start : start + size]
        finally:
            for loan in lent.values():
                if loan is not None:
                    loan.give_back()

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
