"""`TarShards`: a data set in tar shards.

In: the shards of one split, `.tar` or `.tar.gz`, and the classes where they are known. Out: encoded
images by index, read by any number of threads at once. A plain shard is read where it lies; a
compressed one is unpacked into memory, for small sets such as the embedded one.
"""

from __future__ import annotations

import bisect
import gzip
import io
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.core.errors import DataError
from paceline.data.class_list import FILE_NAME, numbered_classes
from paceline.data.randomness import Int64
from paceline.data.tar_index import ShardIndex, scan_shard

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# A process may usually hold 1024 descriptors; shards beyond these are opened for each read.
_DESCRIPTORS_KEPT = 256
_COMPRESSED_LIMIT_BYTES = 4 << 30


class TarShards:
    """Samples in the order of the shards' names, then in the order inside each shard."""

    def __init__(self, paths: Sequence[Path], classes: Sequence[str] | None = None) -> None:
        """Indexes every shard; a shard that is damaged or wrongly labelled fails by name."""
        self._paths = sorted(paths)
        self._contents: list[_Content] = []
        self._indexes: list[ShardIndex] = []
        _check_compressed(self._paths)
        try:
            for position, path in enumerate(self._paths):
                self._add(path, keep_open=position < _DESCRIPTORS_KEPT)
        except DataError:
            self.close()
            raise
        lengths = [len(index) for index in self._indexes]
        self._first: list[int] = np.cumsum([0, *lengths]).tolist()
        if not self._first[-1]:
            raise DataError(
                f"{self._paths[0] if self._paths else 'no shard'}: no image in any of "
                f"{len(self._paths)} shards",
                "samples are key.jpg (jpeg, png, webp) and key.cls, no other dot in the key",
            )
        self.labels: Int64 = np.concatenate([index.labels for index in self._indexes])
        highest = int(self.labels.max())
        self.classes: Sequence[str] = numbered_classes(highest + 1) if classes is None else classes
        if highest >= len(self.classes):
            self._reject_label(int(np.argmax(self.labels >= len(self.classes))))

    def _add(self, path: Path, keep_open: bool) -> None:
        if path.name.endswith("gz"):
            unpacked = _UnpackedShard(path)
            self._contents.append(unpacked)
            self._indexes.append(scan_shard(path, io.BytesIO(unpacked.data)))
            return
        self._contents.append(_PlainShard(path, keep_open))
        try:
            with path.open("rb") as content:
                self._indexes.append(scan_shard(path, content))
        except OSError as error:
            raise _unreadable(path, error) from None

    def _reject_label(self, i: int) -> None:
        raise DataError(
            f"{self.name(i)}: label {self.labels[i]} is outside the {len(self.classes)} classes",
            f"mend the .cls file, or name the class in {FILE_NAME}",
        )

    def __len__(self) -> int:
        return self._first[-1]

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard = bisect.bisect_right(self._first, i) - 1
        return shard, i - self._first[shard]

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the shard itself can no longer be read."""
        shard, place = self._locate(i)
        index = self._indexes[shard]
        return self._contents[shard].read(int(index.offsets[place]), int(index.sizes[place]))

    def name(self, i: int) -> str:
        shard, place = self._locate(i)
        return f"{self._paths[shard].name}:{self._indexes[shard].names[place]}"

    def close(self) -> None:
        """Gives the descriptors back; no read may be in progress."""
        for content in self._contents:
            content.close()


class _Content(Protocol):
    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class _PlainShard:
    """Reads by position, so that threads share one descriptor without a lock around the read."""

    def __init__(self, path: Path, keep_open: bool) -> None:
        self._path = path
        self._keep_open = keep_open
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def read(self, offset: int, size: int) -> bytes:
        try:
            if not self._keep_open:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    data = _pread(descriptor, offset, size)
                finally:
                    os.close(descriptor)
            else:
                data = _pread(self._opened(), offset, size)
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if len(data) < size:
            raise DataError(
                f"{self._path}: ends at byte {offset + len(data)}, but was longer at the start",
                "do not change shards under a run; copy the shard anew and resume",
            )
        return data

    def _opened(self) -> int:
        if self._descriptor is None:
            with self._lock:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class _UnpackedShard:
    def __init__(self, path: Path) -> None:
        try:
            self.data = gzip.decompress(path.read_bytes())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: not a readable gzip file ({error})", "copy or build the shard anew"
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from None

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        self.data = b""


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    """Reads on until all is there or the file ends: one call may return less."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror or error})",
        "check that the data directory is still there and mounted, and its permissions",
    )


def _check_compressed(paths: Sequence[Path]) -> None:
    try:
        total = sum(path.stat().st_size for path in paths if path.name.endswith("gz"))
    except OSError as error:
        raise _unreadable(Path(error.filename), error) from None
    if total > _COMPRESSED_LIMIT_BYTES:
        raise DataError(
            f"{paths[0].parent}: {total / 2**30:.1f} GiB of compressed shards, which each rank "
            f"would hold in memory (limit {_COMPRESSED_LIMIT_BYTES >> 30} GiB)",
            "decompress them with gunzip; plain .tar shards are read where they lie",
        )
