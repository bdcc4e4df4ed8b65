"""`RegionDecoder`: decodes only the part of a JPEG that the crop needs, with the C library.

Pillow decodes files that the library does not support (formats other than JPEG, CMYK, rotation by
Exif). Pillow also decodes damaged files and reports the damage. Each call of the library processes
several samples without the interpreter lock. Threads that take and release the lock for every
sample would slow down each other and the training.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.data.augment import Pixels, SquareTransform
from paceline.data.batch import Chunk
from paceline.data.decode.decoder import PillowDecoder, RegionUnavailableError
from paceline.data.decode.library import (
    Pieces,
    RegionLibrary,
    StoredFiles,
    down_first,
    region_library,
)
from paceline.data.image import CorruptImage
from paceline.data.order import Int64
from paceline.data.prefetch import Progress
from paceline.data.sources.base import Source, Stored
from paceline.data.sources.storage import Loan, ShardFile

# Samples per call of the library. Closing a loader waits for at most one call per thread.
_AT_ONCE = 16
_ALIGNMENT = 64
# Larger files are read one by one, because each thread keeps the memory that it read into.
_LARGEST_FILE, _MOST_BYTES = 16 << 20, 64 << 20
# Maximum number of shards that a call may open in addition to shards that are kept open, because
# file descriptors are scarce.
_MOST_OPENED = 4


class RegionDecoder(PillowDecoder):
    """Decodes crops of JPEGs with the C library.

    The recorded time "decode" includes cropping and resampling.
    """

    def __init__(
        self,
        source: Source,
        transform: SquareTransform,
        library: RegionLibrary,
        *,
        notes: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Creates a decoder. `options` are passed to `PillowDecoder`."""
        note = f"region decoder, {library.version}"
        super().__init__(source, transform, notes=(note, *notes), **options)
        self._library = library
        self._local = threading.local()
        self._lock = threading.Lock()
        self._seen = self._refused = 0

    def prepare(
        self, data: Stored, numbers: Sequence[float], out: Pixels, progress: Progress
    ) -> None:
        start = perf_counter()
        if isinstance(data, bytes):
            stage, done = "decode", self._decode(data, numbers, out)
        else:
            stage, done = "augment", self._resample(data, numbers, out)
        prepared = perf_counter()
        progress.add(stage, prepared - start)
        self._count(1, refused=not done)
        if not done:
            super().prepare(data, numbers, out, progress)
            return
        self.transform.finish(numbers, out)
        progress.add("augment", perf_counter() - prepared)

    def _decode(self, data: bytes, numbers: Sequence[float], out: Pixels) -> bool:
        shape = self._library.size(data)
        if shape is None:
            return False
        transform = self.transform
        box, flip = transform.box(*shape, numbers), transform.flips(numbers)
        return self._library.prepare(data, shape, box, flip, transform.interpolation, out)

    def _resample(self, pixels: Pixels, numbers: Sequence[float], out: Pixels) -> bool:
        transform, (height, width, _) = self.transform, pixels.shape
        box, flip = transform.box(width, height, numbers), transform.flips(numbers)
        return self._library.square(pixels, box, flip, transform.interpolation, out)

    def fill_together(self, chunk: Chunk, out: Pixels) -> Sequence[int]:
        """Decodes several samples with one call if they are stored in files, and returns their rows."""
        if not self.source.has_extents:
            return ()
        numbers = chunk.numbers.tolist()
        rows = [row for row in range(len(chunk)) if not chunk.is_dropped(row)]
        filled: list[int] = []
        for first in range(0, len(rows), _AT_ONCE):
            chunk.progress.check()
            filled += self._fill_some(chunk, rows[first : first + _AT_ONCE], numbers, out)
        self._count(len(filled))
        return filled

    def _fill_some(
        self, chunk: Chunk, rows: Sequence[int], numbers: Sequence[Sequence[float]], out: Pixels
    ) -> list[int]:
        if not hasattr(self._local, "read"):
            self._local.read = BulkRead(self.source)
        start = perf_counter()
        data: list[memoryview | None] = self._local.read([int(chunk.indices[row]) for row in rows])
        read = perf_counter()
        files = {row: file for row, file in zip(rows, data, strict=True) if file is not None}
        filled = self._decode_together(files, numbers, out) if files else []
        decoded = perf_counter()
        for row in filled:
            self.transform.finish(numbers[row], out[row])
        chunk.progress.add("read", read - start)
        chunk.progress.add("decode", decoded - read)
        chunk.progress.add("augment", perf_counter() - decoded)
        return filled

    def _decode_together(
        self, by_row: dict[int, memoryview], numbers: Sequence[Sequence[float]], out: Pixels
    ) -> list[int]:
        """Decodes several files with one call, and returns the rows of the images in `out`.

        Args:
            by_row: The bytes of the file for each row of `out` to fill.
            numbers: Random numbers for augmentation, for all rows of `out`.
            out: Receives the images, samples × height × width × channels.
        """
        transform, rows = self.transform, list(by_row)
        files = StoredFiles(list(by_row.values()))
        sizes = self._library.sizes(files).tolist()
        supported = [place for place, (width, _) in enumerate(sizes) if width]
        if not supported:
            return []
        boxes = np.empty((len(supported), 4), dtype=np.float32)
        turns = np.empty((len(supported), 2), dtype=np.int32)
        for at, place in enumerate(supported):
            row, (width, height) = numbers[rows[place]], sizes[place]
            boxes[at] = transform.box(width, height, row)
            turns[at] = transform.flips(row), down_first(width, height, transform.size)
        done = self._library.prepare_many(
            files.of(supported), boxes, turns, transform.interpolation,
            [out[rows[place]] for place in supported],
        )  # fmt: skip
        return [rows[place] for place, is_done in zip(supported, done, strict=True) if is_done]

    def _count(self, samples: int, *, refused: bool = False) -> None:
        with self._lock:
            self._seen += samples
            self._refused += refused

    def note(self) -> str:
        if not self._refused:
            return ""
        return f"{self._refused:,} of {self._seen:,} samples were decoded by Pillow instead"


def create_decoder(source: Source, transform: SquareTransform, **options: Any) -> RegionDecoder:
    """Creates a `RegionDecoder`, and loads or builds the C library that it needs.

    Raises:
        RegionUnavailableError: If there is no usable library.
    """
    return RegionDecoder(source, transform, region_library(), **options)


class BulkRead:
    """Reads the files of several samples with one call into memory that it reuses.

    Used by one thread only. A result is valid until the next call.
    """

    def __init__(self, source: Source, *, pinned: bool = False) -> None:
        """Creates a reader. With `pinned`, reads into pinned memory, which a GPU can read directly."""
        self._source = source
        self._library = _library_or_none() if source.has_extents else None
        self._pinned = pinned
        self._memory = np.empty(0, dtype=np.uint8)

    def all(self, indices: Sequence[int], progress: Progress) -> list[Stored | memoryview]:
        """Reads all samples, and returns b"" for corrupt ones.

        Samples that cannot be read together are read one by one.
        """
        progress.check()
        stored: list[Stored | memoryview] = []
        for index, data in zip(indices, self(indices), strict=True):
            if data is None:
                progress.check()
            try:
                stored.append(self._source.read(index) if data is None else data)
            except CorruptImage:
                stored.append(b"")
        return stored

    def __call__(self, indices: Sequence[int]) -> list[memoryview | None]:
        """Reads samples with one call. Returns None for each sample that was not read.

        The caller reads such a sample with `Source.read`. The reason may be that it is not stored
        in a file, that it is too large, or that its shard has changed or is unreadable.
        """
        if self._library is None:
            return [None] * len(indices)
        loans: dict[ShardFile, Loan | None] = {}
        try:
            return self._read(self._library, indices, loans)
        finally:
            for loan in loans.values():
                if loan is not None:
                    loan.give_back()

    def _read(
        self,
        library: RegionLibrary,
        indices: Sequence[int],
        loans: dict[ShardFile, Loan | None],
    ) -> list[memoryview | None]:
        """Reads samples, and adds every file descriptor that it uses to `loans`.

        The caller gives the descriptors back.
        """
        views: list[memoryview | None] = [None] * len(indices)
        wanted: list[tuple[int, Loan, int, int]] = []
        left = _MOST_BYTES
        for place, index in enumerate(indices):
            extent = self._source.extent(index)
            if extent is None:
                continue
            file, offset, size = extent
            if not 0 <= size <= min(left, _LARGEST_FILE):
                continue
            left -= size
            if file not in loans:
                opened = sum(loan is not None and loan.extra for loan in loans.values())
                loans[file] = file.lend(may_open=opened < _MOST_OPENED)
            if (loan := loans[file]) is not None:
                wanted.append((place, loan, offset, size))
        if not wanted:
            return views
        sizes = np.array([size for *_, size in wanted], dtype=np.int64)
        starts = self._reserve(sizes)
        pieces = Pieces(
            np.array([loan.descriptor for _, loan, *_ in wanted], dtype=np.int32),
            np.array([offset for *_, offset, _ in wanted], dtype=np.int64),
            sizes,
            (starts + self._memory.ctypes.data).astype(np.uint64),
        )
        library.read_many(pieces)
        memory = self._memory.data
        rows = zip(wanted, starts.tolist(), pieces.outcomes.tolist(), strict=True)
        for (place, loan, _, size), start, (done, *stamp) in rows:
            if done == size and loan.fits(*stamp):
                views[place] = memory[start : start + size]
        return views

    def _reserve(self, sizes: Int64) -> Int64:
        """Returns an offset into the reader's memory for each file size. Grows the memory if needed."""
        ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
        if ends[-1] > len(self._memory):
            memory = torch.empty(int(ends[-1]) * 5 // 4, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory = memory.numpy()
        return np.concatenate(([0], ends[:-1]))


def _library_or_none() -> RegionLibrary | None:
    try:
        return region_library()
    except RegionUnavailableError:
        return None
