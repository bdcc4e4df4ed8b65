"""Which sample takes a corrupt one's place.

In: the order of the stream, a position whose sample is corrupt, and a way to load samples. Out: the
first good sample after it. Whoever prepares batches asks here, so all ways give the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.order import SampleOrder
from paceline.data.randomness import Int64

Good = TypeVar("Good")


def successor(
    order: SampleOrder,
    position: int,
    first: CorruptSample,
    load: Callable[[int], Good | CorruptSample],
    log: CorruptLog,
) -> tuple[list[CorruptSample], Good, Int64, Int64]:
    """The corrupt samples from `position` on, and the first good one after them, loaded, with its
    epoch and its index.

    Ends for sure: by a good sample, by more corrupt ones than allowed, or by having seen all.
    """
    met = {first.index: first}
    while len(met) <= log.limit and len(met) < order.count:
        position += 1
        epochs, indices = order.at(position, position + 1)
        loaded = load(int(indices[0]))
        if not isinstance(loaded, CorruptSample):
            return list(met.values()), loaded, epochs, indices
        met[loaded.index] = loaded
    raise log.error(met.values())
