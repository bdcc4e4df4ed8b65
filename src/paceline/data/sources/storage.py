"""Files of a data set: read by position with retries, identified by a stamp, locked, and written
whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.files import regular_descriptor, whole_file

T = TypeVar("T")
TRANSIENT = frozenset(
    {
        errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT,
        errno.ECONNRESET, errno.ECONNABORTED, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET,
        errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO,
    }
)  # fmt: skip
READ_RETRIES = 6
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_PROBE_BYTES = 1024
# A replacement by rename leaves an open descriptor with the old file; a look at the name shows it.
_LOOK_EVERY_S = 1.0
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class Retry:
    """Repeats reads that fail with an error that can pass by itself, such as a network file system
    that lost its server; waits 0.1 s, 0.2 s, 0.4 s … at most 5 s between tries. Shared by all
    readers of a source."""

    def __init__(
        self, retries: int = READ_RETRIES, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.retries = retries
        self._sleep = sleep
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Reads that were tried again, since the beginning."""
        return self._count

    def call(self, read: Callable[[], T]) -> T:
        """OSError: not transient, or still there after the last try."""
        wait_s = _FIRST_WAIT_S
        for _ in range(self.retries):
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            with self._lock:
                self._count += 1
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return read()

    def read(self, path: Path | str, read: Callable[[], T]) -> T:
        """The same for `path`: a DataError names it."""
        try:
            return self.call(read)
        except OSError as error:
            raise unreadable(path, error) from None


@dataclass(frozen=True)
class ShardStamp:
    """Identifies the state of a shard that was indexed: size, time of change, and `probe`, a hash
    of some of its bytes, which tells apart what a copying tool gave equal size and time."""

    size: int
    mtime_ns: int
    probe: bytes

    @classmethod
    def of(cls, path: Path) -> ShardStamp:
        """OSError where it cannot be read."""
        descriptor = regular_descriptor(path)
        try:
            found = os.fstat(descriptor)
            middle = found.st_size // 2 // 512 * 512
            probed = b"".join(os.pread(descriptor, _PROBE_BYTES, at) for at in (0, middle))
        finally:
            os.close(descriptor)
        return cls(found.st_size, found.st_mtime_ns, hashlib.sha256(probed).digest())

    @staticmethod
    def to_arrays(stamps: Sequence[ShardStamp]) -> dict[str, npt.NDArray[Any]]:
        numbers = [(stamp.size, stamp.mtime_ns) for stamp in stamps]
        probes = b"".join(stamp.probe for stamp in stamps)
        return {
            "stamps": np.array(numbers, dtype=np.int64).reshape(-1, 2),
            "probes": np.frombuffer(probes, dtype=np.uint8).reshape(len(stamps), -1),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> list[ShardStamp]:
        """The inverse of `to_arrays`."""
        states = zip(arrays["stamps"].tolist(), arrays["probes"], strict=True)
        return [ShardStamp(size, mtime, probe.tobytes()) for (size, mtime), probe in states]

    def fits(self, found: os.stat_result) -> bool:
        """Whether `found` may still be the same file, as far as a look from outside can tell."""
        return found.st_size == self.size and found.st_mtime_ns == self.mtime_ns


class ShardFile:
    """The content of one shard, read by position, so that threads share one descriptor without a
    lock.

    A shard that vanished, was cut, or was replaced since it was indexed raises DataError: its
    samples would be other images than their labels say.
    """

    def __init__(self, path: Path, stamp: ShardStamp, retry: Retry, keep_open: bool) -> None:
        self._path = path
        self._stamp = stamp
        self._retry = retry
        self._keep_open = keep_open
        self._lock = threading.Lock()
        # Readers use copies of it, so that it can be closed at any time.
        self._kept: int | None = None
        self._looked_s = 0.0

    def read(self, offset: int, size: int) -> bytes:
        data = self._retry.read(self._path, lambda: self._read(offset, size))
        if len(data) < size:
            raise DataError(
                f"{self._path}: ends at byte {offset + len(data)}, but was longer at the start",
                "do not change shards under a run; copy the shard anew and resume",
            )
        return data

    def lend(self, *, may_open: bool = True) -> Loan | None:
        """A descriptor to read from outside of Python, until `give_back`; check `Loan.fits` after
        reading, for the file may have changed. None where the file would have to be opened and must
        not be, and on any error: an ordinary read then meets the same error, with retries and a
        message."""
        if not (self._keep_open or may_open):
            return None
        try:
            descriptor = self._open()
        except OSError:
            return None
        try:
            self._look_at_name(descriptor)
        except (OSError, DataError):
            os.close(descriptor)
            return None
        return Loan(descriptor, self._stamp, extra=not self._keep_open)

    def _open(self) -> int:
        """A descriptor that the caller closes."""
        if not self._keep_open:
            return regular_descriptor(self._path)
        with self._lock:
            if self._kept is None:
                self._kept = regular_descriptor(self._path)
            return os.dup(self._kept)

    def _read(self, offset: int, size: int) -> bytes:
        descriptor = self._open()
        try:
            self._look_at_name(descriptor)
            return self._checked(descriptor, offset, size)
        except OSError:
            # A stale handle of a network file system never gets well: the next try opens anew.
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _checked(self, descriptor: int, offset: int, size: int) -> bytes:
        data = _pread(descriptor, offset, size)
        found = os.fstat(descriptor)
        # One that is cut short of these bytes has a better message than "changed".
        if len(data) == size and not self._stamp.fits(found):
            raise self._changed()
        return data

    def _look_at_name(self, descriptor: int) -> None:
        """Finds a file in place of the one that is kept open."""
        now = time.monotonic()
        if not self._keep_open or now - self._looked_s < _LOOK_EVERY_S:
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

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            os.close(kept)


@dataclass(frozen=True)
class Loan:
    """A descriptor that is not closed before `give_back`. `extra`: the file was opened for this loan."""

    descriptor: int
    stamp: ShardStamp
    extra: bool

    def fits(self, size: int, mtime_ns: int) -> bool:
        return (size, mtime_ns) == (self.stamp.size, self.stamp.mtime_ns)

    def give_back(self) -> None:
        os.close(self.descriptor)


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    """Reads on until all is there or the file ends: one call may return less."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def unreadable(path: Path | str, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror or error})",
        "check that the data directory is still there and mounted, and its permissions",
    )


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """A lock between the processes of a host, released by the operating system when its holder
    ends.

    True while held; False where `wait` is off and somebody else holds it; None where this place
    knows no locks (a read-only directory, some network file systems).
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield None
        return
    try:
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def write_file(path: Path, content: bytes) -> None:
    """DataError where the disk does not take it."""
    with written_file(path) as file:
        file.write(content)


@contextmanager
def written_file(path: Path) -> Iterator[BinaryIO]:
    """As `whole_file`."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> DataError:
    remedy = "check the directory and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space, then repeat the command"
    return DataError(f"{path}: cannot be written ({error.strerror or error})", remedy)
