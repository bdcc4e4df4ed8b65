"""The content of one shard, read by position.

In: a shard, and the stamp it had when it was indexed. Out: stretches of its bytes, to any number of
threads at once. A shard that vanished, was cut, or was replaced by another since then is a `DataError`:
its samples would be other images than their labels say.
"""

from __future__ import annotations

import gzip
import os
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.errors import DataError
from paceline.data.sources.retry import Retry
from paceline.data.sources.shard_stamp import ShardStamp

# A replacement by rename leaves an open descriptor with the old file; who looks at the name sees it.
_LOOK_EVERY_S = 1.0
_PIECE_BYTES = 1 << 20


class ShardContent(Protocol):
    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class _Handle:
    """A descriptor, and how many read through it."""

    def __init__(self, path: Path, readers: int = 0, retired: bool = False) -> None:
        """One that is retired is closed by its last reader."""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.readers = readers
        self.retired = retired


class ShardFile:
    """Reads by position, so that threads share one descriptor without a lock around the read."""

    def __init__(self, path: Path, stamp: ShardStamp, retry: Retry, keep_open: bool) -> None:
        self._path = path
        self._stamp = stamp
        self._retry = retry
        self._keep_open = keep_open
        self._lock = threading.Lock()
        self._handle: _Handle | None = None
        self._looked_s = 0.0

    def read(self, offset: int, size: int) -> bytes:
        try:
            data = self._retry.call(lambda: self._read(offset, size))
        except OSError as error:
            raise unreadable(self._path, error) from None
        if len(data) < size:
            raise DataError(
                f"{self._path}: ends at byte {offset + len(data)}, but was longer at the start",
                "do not change shards under a run; copy the shard anew and resume",
            )
        return data

    def lend(self, *, may_open: bool = True) -> Lent | None:
        """A descriptor, until `give_back`, to read past Python; None where there is trouble: an ordinary
        read then meets the same, and has retries and words for it. What is read so may be of a file
        that has changed: see `Lent.fits`. None also where it would have to be opened for this and may
        not be."""
        try:
            if not self._keep_open and not may_open:
                return None
            if not self._keep_open:
                opened = _Handle(self._path, readers=1, retired=True)
                return Lent(self, opened, self._stamp, extra=True)
            handle = self._taken()
            try:
                self._look_at_name(handle.descriptor)
            except BaseException:
                self._give_back(handle)
                raise
        except (OSError, DataError):
            return None
        return Lent(self, handle, self._stamp)

    def _read(self, offset: int, size: int) -> bytes:
        if not self._keep_open:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._checked(descriptor, offset, size)
            finally:
                os.close(descriptor)
        handle = self._taken()
        try:
            self._look_at_name(handle.descriptor)
            return self._checked(handle.descriptor, offset, size)
        except OSError:
            # A stale handle of a network file system never gets well: the next try opens anew.
            self._retire(handle)
            raise
        finally:
            self._give_back(handle)

    def _checked(self, descriptor: int, offset: int, size: int) -> bytes:
        data = _pread(descriptor, offset, size)
        found = os.fstat(descriptor)
        # One that is cut short of these bytes has a better message than "changed".
        if len(data) == size and not self._stamp.fits(found):
            raise self._changed()
        return data

    def _look_at_name(self, descriptor: int) -> None:
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return
        found = self._path.stat()
        if not self._stamp.fits(found) and found.st_ino != os.fstat(descriptor).st_ino:
            raise self._changed()
        # Not before: whoever reads next must meet what this look met.
        self._looked_s = now

    def _changed(self) -> DataError:
        return DataError(
            f"{self._path}: has changed since the start, or was replaced by another",
            "do not change shards under a run; put the shard back and resume",
        )

    def _taken(self) -> _Handle:
        with self._lock:
            if self._handle is None:
                self._handle = _Handle(self._path)
            self._handle.readers += 1
            return self._handle

    def _retire(self, handle: _Handle) -> None:
        """No more readers; the last one that has it closes it."""
        with self._lock:
            handle.retired = True
            if self._handle is handle:
                self._handle = None

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.readers -= 1
            if handle.retired and not handle.readers:
                os.close(handle.descriptor)

    def close(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.retired = True
                if not self._handle.readers:
                    os.close(self._handle.descriptor)
                self._handle = None


@dataclass(frozen=True)
class Lent:
    """A descriptor that is not closed before `give_back`. `extra`: it was opened for this loan."""

    file: ShardFile
    handle: _Handle
    stamp: ShardStamp
    extra: bool = False

    @property
    def descriptor(self) -> int:
        return self.handle.descriptor

    def fits(self, size: int, mtime_ns: int) -> bool:
        return (size, mtime_ns) == (self.stamp.size, self.stamp.mtime_ns)

    def give_back(self) -> None:
        self.file._give_back(self.handle)


class UnpackedShard:
    """A compressed shard, in memory; DataError where it would take more than `limit_bytes`."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        try:
            # Piece by piece: a small file can unpack to any size.
            pieces, size = [], 0
            with gzip.open(path) as file:
                while size <= limit_bytes and (piece := file.read(_PIECE_BYTES)):
                    pieces.append(piece)
                    size += len(piece)
            self.data = b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: not a readable gzip file ({error})", "copy or build the shard anew"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from None
        if len(self.data) > limit_bytes:
            raise DataError(
                f"{path}: unpacks to more than {limit_bytes / 2**30:.1f} GiB, all that compressed "
                "shards may still take of each rank's memory",
                "decompress them with gunzip; plain .tar shards are read where they lie",
            )

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        self.data = b""


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror or error})",
        "check that the data directory is still there and mounted, and its permissions",
    )


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    """Reads on until all is there or the file ends: one call may return less."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
