"""`Source`: labelled images by index, whatever they are stored in.

A source sets `classes` and `labels` and implements `read`. Everything else that a kind of storage may
offer is declared here with a default, so that whoever uses a source never has to ask what it is.
`OwnSource` checks a source of the user's own class: what it does wrong is one line, on all ranks.

`SubsetSource` is some samples of a source; `validation_indices` those that `data.val_split` takes. The
split depends on the labels alone, not on the run's seed: runs with other seeds validate on the same
images, and a resumed or evaluated run finds its split again without a record of it.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.untrusted import short_repr
from paceline.data.image import CorruptImage
from paceline.data.order import SPLIT_STREAM, Int64, hash64
from paceline.data.sources.storage import Retry, ShardFile

Split = Literal["train", "val"]
Stored = bytes | npt.NDArray[np.uint8]
# A file, and the offset and size of a sample in it.
Extent = tuple[ShardFile, int, int]
_STORED = "read(i) returns the bytes of an image file, or a height × width × channels uint8 array"


@dataclass(frozen=True)
class FileFacts:
    """What a source has learned about its files: numbers, and `about`, which JSON can hold."""

    kind: str
    arrays: Mapping[str, npt.NDArray[Any]]
    about: Mapping[str, Any]


class Source(ABC):
    """Read by several threads at once. Sub-classes set `classes` (names) and `labels` (an index into
    them for each sample: a list or an array), and implement `read`.

    `shard_sizes`: how many samples each shard has, in order; None where the data is not in shards.
    `pixels`: all images at once, equal in size, samples × height × width × channels; None where
    there is no such array. `is_in_memory`: reading needs no storage, so a cache would be of no use.
    `has_extents`: `extent` finds samples, which can then be read many at a time. `retry`: counts
    the reads that were repeated. `is_constant`: a sample is the same whenever it is read, so that it may
    be kept.
    """

    classes: Sequence[str]
    if TYPE_CHECKING:
        # A plain attribute, assigned as any whole numbers and read as the array that `checked_source`
        # makes of them.
        @property
        def labels(self) -> Int64: ...
        @labels.setter
        def labels(self, labels: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None: ...

    shard_sizes: Sequence[int] | None = None
    pixels: npt.NDArray[np.uint8] | None = None
    is_in_memory: bool = False
    has_extents: bool = False
    is_constant: bool = True
    retry: Retry | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, i: int) -> Stored:
        """The encoded image, or its pixels as height × width × channels. DataError where storage
        fails."""

    def name(self, i: int) -> str:
        """Where the sample lies, for messages."""
        return f"{type(self).__name__}[{i}]"

    def extent(self, i: int) -> Extent | None:
        """Where the encoded image lies in a file; None where it has to be read by `read`."""
        return None

    def sizes(self) -> Int64 | None:
        """Bytes of each encoded image, below 0 if its file cannot be read; None if only reading tells."""
        return None

    def close(self) -> None:  # noqa: B027  (most hold nothing open)
        """Releases what is held open; no read may be in progress."""

    @property
    def kind(self) -> str:
        """What the images are stored in, for display."""
        return type(self).__name__

    @property
    def note(self) -> str:
        """What the user should know about the source; empty where there is nothing."""
        return ""

    @property
    def uncached(self) -> Source:
        """The source without the cache in front of it."""
        return self

    def file_facts(self) -> FileFacts | None:
        """By which another process makes this source without a look at its files; None where opening
        it takes only a few of them."""
        return None

    def counters(self) -> dict[str, int]:
        """What was counted so far: repeated reads, hits and misses of a cache."""
        return {} if self.retry is None else {"read_retries": self.retry.count}

    def identity(self) -> bytes:
        """Changes when the samples change, as far as that shows without reading every image."""
        if self.pixels is not None:
            return self.pixels.tobytes()
        names = (self.name(i).encode("utf-8", "surrogateescape") for i in range(len(self)))
        return b"".join(name + b"\0" for name in names)


def source_identity(source: Source) -> str:
    """A digest of classes, labels and `identity`. Files and shards are identified by name, size and
    time of change: a copy that keeps the times has the identity of its original, wherever it lies.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(list(source.classes)).encode())
    digest.update(source.labels.tobytes())
    digest.update(source.identity())
    return digest.hexdigest()[:32]


def checked_source(source: Source) -> Source:
    """Sources of this package check themselves."""
    if type(source).__module__.startswith("paceline."):
        return source
    return OwnSource(source)


class WrappedSource(Source):
    """Does what `whole` does; sub-classes change some of it. Sample i is `at(i)` of `whole`."""

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.classes, self.labels = whole.classes, whole.labels
        self.shard_sizes, self.pixels = whole.shard_sizes, whole.pixels
        self.is_in_memory, self.has_extents = whole.is_in_memory, whole.has_extents
        self.is_constant, self.retry = whole.is_constant, whole.retry

    def at(self, i: int) -> int:
        return i

    def read(self, i: int) -> Stored:
        return self.whole.read(self.at(i))

    def name(self, i: int) -> str:
        return self.whole.name(self.at(i))

    def extent(self, i: int) -> Extent | None:
        return self.whole.extent(self.at(i))

    def close(self) -> None:
        self.whole.close()

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def note(self) -> str:
        return self.whole.note

    def counters(self) -> dict[str, int]:
        return self.whole.counters()

    def identity(self) -> bytes:
        return self.whole.identity()


class OwnSource(WrappedSource):
    """A source of the user's own class; its labels may be any sequence of whole numbers."""

    def __init__(self, source: Source) -> None:
        name = type(source).__name__
        try:
            labels, classes = np.asarray(source.labels), list(source.classes)
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{name}: {error}", "a source sets `classes` and `labels`") from None
        if labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
            raise DataError(
                f"{name}: labels are {short_repr(source.labels)}",
                "give a class index for each image",
            )
        if not all(isinstance(label, str) for label in classes):
            raise DataError(f"{name}: classes are {short_repr(classes)}", "give their names")
        worst = int(np.argmax((labels < 0) | (labels >= len(classes))))
        if not 0 <= labels[worst] < len(classes):
            raise DataError(
                f"{name}: label {labels[worst]} of image {worst} is outside the {len(classes)} classes",
                "labels are 0, 1, 2 … in the order of `classes`",
            )
        super().__init__(source)
        self.classes, self.labels = classes, labels.astype(np.int64)

    def read(self, i: int) -> Stored:
        try:
            found = self.whole.read(i)
        except (PacelineError, CorruptImage, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"{self.kind}: read({i}) raised {type(error).__name__}: {error}", "fix the source"
            ) from error
        if isinstance(found, bytes):
            return found
        good = isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 3
        if not good or found.shape[2] not in (1, 3) or not found.size:
            shape = (
                f" of shape {found.shape}, {found.dtype}" if isinstance(found, np.ndarray) else ""
            )
            raise DataError(
                f"{self.kind}: read({i}) returned a {type(found).__name__}{shape}", _STORED
            )
        return found


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


class SubsetSource(WrappedSource):
    """The samples `indices` of `source`, in this order, with all that the source can do."""

    def __init__(
        self, source: Source, indices: Int64, note: str = "", *, owner: bool = True
    ) -> None:
        """`indices` ascend. `owner`: closes `source`, and counts for it."""
        super().__init__(source)
        self._indices = indices
        self._note = note
        self._owner = owner
        self.labels = source.labels[indices]
        if source.pixels is not None:
            self.pixels = source.pixels[indices]
        if source.shard_sizes is not None:
            ends = np.cumsum([0, *source.shard_sizes])
            self.shard_sizes = np.diff(np.searchsorted(indices, ends)).tolist()

    def at(self, i: int) -> int:
        return int(self._indices[i])

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
