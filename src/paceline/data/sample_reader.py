"""`SampleReader`: from a sample's index to its pixels, and what happens to a corrupt one.

In: a source, a preparer and the order of the stream. Out: rows of a batch filled in place, and the
corrupt samples met. What lies in a row is a function of its position alone, however the rows are shared
out among threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import perf_counter

from paceline.data.augmentation.augment import Pixels
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.decoding.decode import CorruptImage
from paceline.data.decoding.preparer import Clock, Preparer
from paceline.data.order import SampleOrder
from paceline.data.prefetch import Check
from paceline.data.randomness import Int64, uniform
from paceline.data.sources.source import Source
from paceline.data.successor import successor


class SampleReader:
    """Used by many threads at once; the log is all they share. `clock` is told what time goes into."""

    def __init__(
        self, source: Source, prepare: Preparer, log: CorruptLog, clock: Clock | None = None
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._log = log
        self._clock = clock
        self._together = prepare.together(source)

    def fill_stream(
        self,
        order: SampleOrder,
        start: int,
        images: Pixels,
        labels: Int64,
        check: Check,
    ) -> list[CorruptSample]:
        """Positions from `start` on, as many as there are rows. A corrupt sample gives its row to
        its successor in the stream, augmented as at the successor's own place."""
        epochs, indices = order.at(start, start + len(labels))
        rows = uniform(order.seed, epochs, indices, self._prepare.draws).tolist()
        labels[...] = self._source.labels[indices]
        met: list[CorruptSample] = []
        done = self._fill_together(indices.tolist(), rows, images, check)
        for i, index in enumerate(indices.tolist()):
            if done[i]:
                continue
            check()
            corrupt = self._fill(index, rows[i], images[i])
            if corrupt is not None:
                passed, taken = self._fill_from_successor(
                    order, start + i, corrupt, images[i], check
                )
                met += passed
                labels[i] = self._source.labels[taken]
        return met

    def _fill_from_successor(
        self, order: SampleOrder, position: int, first: CorruptSample, out: Pixels, check: Check
    ) -> tuple[list[CorruptSample], int]:
        """The corrupt samples passed over, and the index of the one that took their place."""
        positions = count(position + 1)

        def load(index: int) -> int | CorruptSample:
            check()
            place = next(positions)
            row = uniform(order.seed, *order.at(place, place + 1), self._prepare.draws)[0].tolist()
            corrupt = self._fill(index, row, out)
            return index if corrupt is None else corrupt

        passed, taken, _, _ = successor(order, position, first, load, self._log)
        return passed, taken

    def fill_indices(
        self, indices: Int64, images: Pixels, labels: Int64, check: Check
    ) -> list[tuple[int, CorruptSample]]:
        """The samples `indices`, a row each. Returns the rows left unfilled, and why."""
        labels[...] = self._source.labels[indices]
        unfilled = []
        rows: list[tuple[float, ...]] = [()] * len(indices)
        done = self._fill_together(indices.tolist(), rows, images, check)
        for i, index in enumerate(indices.tolist()):
            if done[i]:
                continue
            check()
            corrupt = self._fill(index, (), images[i])
            if corrupt is not None:
                unfilled.append((i, corrupt))
        return unfilled

    def _fill_together(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        images: Pixels,
        check: Check,
    ) -> list[bool]:
        """Which rows are filled."""
        done = [False] * len(indices)
        if self._together is None or len(indices) == 1:
            return done
        unknown = [i for i, index in enumerate(indices) if self._log.known(index) is None]
        filled = self._together(
            [indices[i] for i in unknown], [rows[i] for i in unknown], [images[i] for i in unknown],
            check, self._clock,
        )  # fmt: skip
        for i, is_filled in zip(unknown, filled, strict=True):
            done[i] = is_filled
        return done

    def _fill(self, index: int, row: Sequence[float], out: Pixels) -> CorruptSample | None:
        """None once `out` is filled."""
        known = self._log.known(index)
        if known is not None:
            return known
        start = perf_counter()
        data = self._source.read(index)
        if self._clock is not None:
            self._clock.add("read", perf_counter() - start)
        try:
            self._prepare(data, row, out, self._clock)
        except CorruptImage as error:
            sample = CorruptSample(index, self._source.name(index), str(error))
            self._log.add(sample)
            return sample
        return None
