"""`Source`: the interface of a data set with labeled images, independent of how they are stored.

A source sets `classes` and `labels` and implements `read`. All other methods and attributes are
optional. `OwnSource` wraps sources from other packages and checks what they return.

`SubsetSource` contains some samples of a source. `validation_indices` selects the samples for
validation with `data.val_split`. The selection depends on the labels only, not on the seed: all
runs validate on the same images, also after a resume.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
# A file, and the offset and size of a sample in this file.
Extent = tuple[ShardFile, int, int]


class Source(ABC):
    """A data set of labeled images. Several threads may call `read` at the same time.

    Subclasses set `classes` and `labels` and implement `read`. The rest is optional.

    Attributes:
        classes: Names of the classes.
        labels: Class index of each sample, as a list or a NumPy array.
        shard_sizes: Number of samples of each shard, in order. None if the data is not in shards.
        pixels: All images if they are in one array (samples × height × width × channels), else
            None.
        is_in_memory: True if reading needs no storage, so that a cache would be useless.
        has_extents: True if `extent` returns positions in files, so that samples can be read
            together.
        is_constant: True if every read of a sample returns the same image.
        retry: Repeats failed reads and counts the repetitions.

    Example:
        >>> class Album(Source):
        ...     def __init__(self, paths):
        ...         self.paths, self.classes = paths, ["cat", "dog"]
        ...         self.labels = [int(path.name.startswith("dog")) for path in paths]
        ...
        ...     def read(self, i):
        ...         return self.paths[i].read_bytes()
    """

    classes: Sequence[str]
    if TYPE_CHECKING:
        # Assigning accepts any sequence of integers. `checked_source` converts the sequence to an array.
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
        """Returns the bytes of an image file, or pixels as height × width × channels in uint8.

        Raises:
            CorruptImage: If the image is damaged. Training then uses another sample instead.
            DataError: If reading from storage fails.
        """

    def name(self, i: int) -> str:
        """Returns the path or another name of a sample, for messages."""
        return f"{type(self).__name__}[{i}]"

    def extent(self, i: int) -> Extent | None:
        """Returns the file, offset and size of an encoded image, or None if only `read` can return it."""
        return None

    def close(self) -> None:  # noqa: B027  (optional)
        """Closes open files. Must not be called while another thread reads."""

    @property
    def kind(self) -> str:
        """The kind of data set, such as "tar shards", for messages."""
        return type(self).__name__

    @property
    def note(self) -> str:
        """A note about the source for the user, or ""."""
        return ""

    def counters(self) -> dict[str, int]:
        """Returns the numbers of repeated reads, cache hits and cache misses so far."""
        return {} if self.retry is None else {"read_retries": self.retry.count}

    def identity(self) -> bytes:
        """Returns bytes that identify the samples, such as a hash of file names, sizes and times."""
        if self.pixels is not None:
            return self.pixels.tobytes()
        names = (self.name(i).encode("utf-8", "surrogateescape") for i in range(len(self)))
        return b"".join(name + b"\0" for name in names)


def source_identity(source: Source) -> str:
    """Returns a digest of the classes, the labels and `Source.identity`.

    Files and shards are identified by name, size and modification time. A copy that keeps the
    modification times has the same identity.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(list(source.classes)).encode())
    digest.update(source.labels.tobytes())
    digest.update(source.identity())
    return digest.hexdigest()[:32]


def checked_source(source: Source) -> Source:
    """Wraps `source` in an `OwnSource`, unless its class belongs to this package."""
    if type(source).__module__.startswith("paceline."):
        return source
    return OwnSource(source)


class WrappedSource(Source):
    """Base class of sources that forward all calls to another source, `whole`.

    Sample i is sample `at(i)` of `whole`.
    """

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
    """Checks the attributes and results of a source from another package."""

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
            raise DataError(f"{name}: classes are {short_repr(classes)}", "give names")
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
            data = self.whole.read(i)
        except (PacelineError, CorruptImage, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"{self.kind}: read({i}) raised {type(error).__name__}: {error}", "fix the source"
            ) from error
        if isinstance(data, bytes):
            return data
        is_array = isinstance(data, np.ndarray)
        if not is_array or data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] not in (1, 3):
            shape = f" of shape {data.shape}, {data.dtype}" if is_array else ""
            raise DataError(
                f"{self.kind}: read({i}) returned a {type(data).__name__}{shape}",
                "return the bytes of an image file, or a height × width × channels uint8 array",
            )
        if not data.size:
            raise DataError(f"{self.kind}: read({i}) returned an empty array", "return an image")
        return data


def validation_indices(labels: Int64, share: float) -> Int64:
    """Selects about the fraction `share` of the samples of each class for validation.

    The selection has at least one sample of each class with two or more samples, and none of a
    class with one sample. A hash of the class and of the sample's position in the class decides. So
    adding images to one class does not change the selection from other classes.
    """
    taken = []
    order = np.argsort(labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        keys = hash64(0, SPLIT_STREAM, int(labels[members[0]]), np.arange(len(members)))
        taken.append(members[np.argsort(keys, kind="stable")[:count]])
    indices: Int64 = np.sort(np.concatenate(taken))
    return indices


def split_source(source: Source, share: float, split: Split, *, owner: bool = True) -> SubsetSource:
    """Divides a source for training and validation, and returns the samples of `split`.

    Args:
        source: All samples.
        share: Fraction of the samples of each class for validation.
        split: The split to return.
        owner: If True, closing the result also closes `source`. Use True for one split only.

    Raises:
        ConfigError: If no class has at least two samples.
    """
    held_out = validation_indices(source.labels, share)
    if not len(held_out):
        raise ConfigError(
            "data.val_split", share, "needs a class with two or more images",
            "add images, or a validation set",
        )  # fmt: skip
    kept = np.ones(len(source), dtype=bool)
    kept[held_out] = False
    note = (
        f"data.val_split = {share:g}: {len(held_out)} of {len(source)} images are for validation, "
        "independent of the seed"
    )
    if split == "val":
        return SubsetSource(source, held_out, owner=owner)
    if single := int((np.bincount(source.labels) == 1).sum()):
        note += f"; classes without validation images, because they have only one: {single}"
    return SubsetSource(source, np.flatnonzero(kept), note, owner=owner)


class SubsetSource(WrappedSource):
    """The samples `indices` of a source, in this order."""

    def __init__(
        self, source: Source, indices: Int64, note: str = "", *, owner: bool = True
    ) -> None:
        """Creates a subset.

        Args:
            source: All samples.
            indices: Indices of the samples in the subset, ascending.
            note: Text to add to the note of `source`.
            owner: If True, closing the subset also closes `source`, and the subset reports the
                counters of `source`.
        """
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
