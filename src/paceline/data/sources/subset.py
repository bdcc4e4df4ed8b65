"""`SubsetSource`: some samples of a source; `validation_indices`: those that `data.val_split` takes.

The split depends on the labels alone, not on the run's seed: runs with other seeds validate on the same
images, and a resumed or evaluated run finds its split again without a record of it.
"""

from __future__ import annotations

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.order import SPLIT_STREAM, Int64, hash64
from paceline.data.sources.base import Extent, Source, Split, Stored


def validation_indices(labels: Int64, share: float) -> Int64:
    """About `share` of the samples of each class, at least one where the class has two or more.

    Which ones is a hash of the class and of the sample's place in it, so that a class that grows does
    not change the split of the others. A class of one sample stays whole in training.
    """
    taken = []
    order = np.argsort(labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        keys = hash64(0, SPLIT_STREAM, int(labels[members[0]]), np.arange(len(members)))
        taken.append(members[np.argsort(keys, kind="stable")[:count]])
    found: Int64 = np.sort(np.concatenate(taken))
    return found


def split_source(source: Source, share: float, split: Split, *, owner: bool = True) -> SubsetSource:
    """The part of `source` that is `split`. `owner`: closes the source; of two parts of one source
    only one may."""
    held_out = validation_indices(source.labels, share)
    if not len(held_out):
        raise ConfigError(
            "data.val_split", share, "no class has two images, of which one could be for validation",
            "add images, or a validation set",
        )  # fmt: skip
    kept = np.ones(len(source), dtype=bool)
    kept[held_out] = False
    note = (
        f"data.val_split = {share:g}: {len(held_out)} of {len(source)} images are for validation, "
        "by class, whatever the seed"
    )
    if split == "val":
        return SubsetSource(source, held_out, owner=owner)
    single = int((np.bincount(source.labels) == 1).sum())
    if single:
        note += f"; {single} class{'es' if single > 1 else ''} with one image have none"
    return SubsetSource(source, np.flatnonzero(kept), note, owner=owner)


class SubsetSource(Source):
    """The samples `indices` of `source`, in this order, with all that the source can do."""

    def __init__(
        self, source: Source, indices: Int64, note: str = "", *, owner: bool = True
    ) -> None:
        """`indices` ascend. `owner`: closes `source`, and counts for it."""
        self.whole = source
        self._indices = indices
        self._note = note
        self._owner = owner
        self.classes = source.classes
        self.labels = source.labels[indices]
        self.is_in_memory = source.is_in_memory
        self.has_extents = source.has_extents
        self.is_constant = source.is_constant
        self.retry = source.retry
        if source.pixels is not None:
            self.pixels = source.pixels[indices]
        if source.shard_sizes is not None:
            ends = np.cumsum([0, *source.shard_sizes])
            self.shard_sizes = np.diff(np.searchsorted(indices, ends)).tolist()

    def read(self, i: int) -> Stored:
        return self.whole.read(int(self._indices[i]))

    def name(self, i: int) -> str:
        return self.whole.name(int(self._indices[i]))

    def extent(self, i: int) -> Extent | None:
        return self.whole.extent(int(self._indices[i]))

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def note(self) -> str:
        return "; ".join(filter(None, (self.whole.note if self._owner else "", self._note)))

    def counters(self) -> dict[str, int]:
        return self.whole.counters() if self._owner else {}

    def identity(self) -> bytes:
        return self.whole.identity() + self._indices.tobytes()

    def close(self) -> None:
        if self._owner:
            self.whole.close()
