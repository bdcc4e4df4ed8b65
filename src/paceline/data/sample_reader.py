"""`SampleReader`: from a sample's index to its pixels, and what happens to a corrupt one.

In: a source, a transform and the order of the stream. Out: rows of a batch filled in place, and the
corrupt samples met. What lies in a row is a function of its position alone, however the rows are shared
out among threads.
"""

from __future__ import annotations

from PIL import Image

from paceline.data.augment import Pixels, Transform
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.decode import CorruptImage, decode
from paceline.data.order import SampleOrder
from paceline.data.prefetch import Check
from paceline.data.randomness import Int64, uniform
from paceline.data.source import Source
from paceline.data.successor import successor


class SampleReader:
    """Used by many threads at once; the log is all they share."""

    def __init__(
        self, source: Source, transform: Transform, channels: int, log: CorruptLog
    ) -> None:
        self._source = source
        self._transform = transform
        self._channels = channels
        self._log = log

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
        rows = uniform(order.seed, epochs, indices, self._transform.draws).tolist()
        labels[...] = self._source.labels[indices]
        met: list[CorruptSample] = []
        for i, index in enumerate(indices.tolist()):
            check()
            loaded = self._load(index)
            if isinstance(loaded, CorruptSample):
                passed, image, epochs, indices = successor(
                    order, start + i, loaded, self._load, self._log
                )
                met += passed
                rows[i] = uniform(order.seed, epochs, indices, self._transform.draws)[0].tolist()
                labels[i] = self._source.labels[indices[0]]
            else:
                image = loaded
            self._transform(image, rows[i], images[i])
        return met

    def fill_indices(
        self, indices: Int64, images: Pixels, labels: Int64, check: Check
    ) -> list[tuple[int, CorruptSample]]:
        """The samples `indices`, a row each. Returns the rows left unfilled, and why."""
        labels[...] = self._source.labels[indices]
        unfilled = []
        for i, index in enumerate(indices.tolist()):
            check()
            loaded = self._load(index)
            if isinstance(loaded, CorruptSample):
                unfilled.append((i, loaded))
            else:
                self._transform(loaded, (), images[i])
        return unfilled

    def _load(self, index: int) -> Image.Image | CorruptSample:
        known = self._log.known(index)
        if known is not None:
            return known
        try:
            return decode(self._source.read(index), self._channels)
        except CorruptImage as error:
            sample = CorruptSample(index, self._source.name(index), str(error))
            self._log.add(sample)
            return sample
