"""`RegionTogether`: samples of a chunk read, decoded and cropped by a few calls.

In: sample indices, their rows of uniform numbers and the places to write to. Out: which places were
filled, with the very pixels of `RegionPreparer`; all others are left to it, one by one, and so are
errors. Python's lock is given away three times for many samples, not three times for each: threads that
take turns at it slow one another down, and the training with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from paceline.data.augmentation.augment import Pixels, SquareTransform
from paceline.data.decoding.preparer import Clock
from paceline.data.prefetch import Check
from paceline.data.region.bulk_read import BulkRead
from paceline.data.region.library import RegionLibrary
from paceline.data.region.pass_order import down_first
from paceline.data.sources.source import Source
from paceline.data.stored_files import StoredFiles

# A loader that is closed waits for as many samples at most.
_AT_ONCE = 16


class RegionTogether:
    """Used by many threads at once. `count` is told how many samples were filled."""

    def __init__(
        self,
        source: Source,
        transform: SquareTransform,
        library: RegionLibrary,
        count: Callable[[int], None],
    ) -> None:
        self._source = source
        self._transform = transform
        self._library = library
        self._count = count
        self._local = threading.local()

    def __call__(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        outs: Sequence[Pixels],
        check: Check,
        clock: Clock | None = None,
    ) -> list[bool]:
        done: list[bool] = []
        for first in range(0, len(indices), _AT_ONCE):
            check()
            some = slice(first, first + _AT_ONCE)
            done += self._fill(indices[some], rows[some], outs[some], clock)
        self._count(sum(done))
        return done

    def _fill(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        outs: Sequence[Pixels],
        clock: Clock | None,
    ) -> list[bool]:
        if not hasattr(self._local, "read"):
            self._local.read = BulkRead(self._source)
        began = perf_counter()
        found: list[memoryview | None] = self._local.read(indices)
        read = perf_counter()
        held = [(row, data) for row, data in enumerate(found) if data is not None]
        done = [False] * len(indices)
        if held:
            places = [row for row, _ in held]
            self._decode(StoredFiles([data for _, data in held]), places, rows, outs, done)
        decoded = perf_counter()
        for row in range(len(indices)):
            if done[row]:
                self._transform.finish(rows[row], outs[row])
        if clock is not None:
            clock.add("read", read - began)
            clock.add("decode", decoded - read)
            clock.add("augment", perf_counter() - decoded)
        return done

    def _decode(
        self,
        files: StoredFiles,
        places: Sequence[int],
        rows: Sequence[Sequence[float]],
        outs: Sequence[Pixels],
        done: list[bool],
    ) -> None:
        """Notes in `done` which of the `places` were filled."""
        transform = self._transform
        sizes = self._library.sizes(files).tolist()
        ours = [number for number, (width, _) in enumerate(sizes) if width]
        if not ours:
            return
        boxes = np.empty((len(ours), 4), dtype=np.float32)
        turns = np.empty((len(ours), 2), dtype=np.int32)
        for at, number in enumerate(ours):
            row, (width, height) = rows[places[number]], sizes[number]
            boxes[at] = transform.box(width, height, row)
            turns[at] = transform.flips(row), down_first(width, height, transform.size)
        filled = self._library.prepare_many(
            files.of(ours), boxes, turns, transform.interpolation,
            [outs[places[number]] for number in ours],
        )  # fmt: skip
        for number, is_filled in zip(ours, filled, strict=True):
            done[places[number]] = is_filled
