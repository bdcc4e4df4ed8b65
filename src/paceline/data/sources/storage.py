"""Reads files by position with retries, detects changed files, locks files, and writes atomically."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

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
# Seconds between checks that the name of an open file still refers to the same file. An open descriptor
# does not show that a rename has replaced the file.
_CHECK_EVERY_S = 1.0
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class Retry:
    """Repeats reads after temporary errors, such as those of a network file system.

    Waits 0.1 s, 0.2 s, 0.4 s … and at most 5 s between tries. All readers of a source share one
    `Retry`.
    """

    def __init__(
        self, retries: int = READ_RETRIES, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.retries = retries
        self._sleep = sleep
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of repeated reads."""
        return self._count

    def call(self, read: Callable[[], T]) -> T:
        """Calls `read` until it succeeds. Raises OSError for a permanent error or after the last try."""
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
        """Calls `read` as `call` does. Raises a DataError that names `path` if all tries fail."""
        try:
            return self.call(read)
        except OSError as error:
            raise unreadable(path, error) from None


@dataclass(frozen=True)
class ShardStamp:
    """Size and time of a shard when it was indexed, to detect later changes.

    Attributes:
        size: Size of the shard in bytes.
        mtime_ns: Modification time of the shard in nanoseconds.
        probe: Hash of some bytes of the shard. Detects another file with equal size and time.
    """

    size: int
    mtime_ns: int
    probe: bytes

    @classmethod
    def of(cls, path: Path) -> ShardStamp:
        """Returns size and time of a file. Raises OSError if the file cannot be read."""
        descriptor = regular_descriptor(path)
        try:
            status = os.fstat(descriptor)
            middle = status.st_size // 2 // 512 * 512
            probed = b"".join(os.pread(descriptor, _PROBE_BYTES, at) for at in (0, middle))
        finally:
            os.close(descriptor)
        return cls(status.st_size, status.st_mtime_ns, hashlib.sha256(probed).digest())

    def fits(self, status: os.stat_result) -> bool:
        """Returns True if size and modification time in `status` are unchanged."""
        return status.st_size == self.size and status.st_mtime_ns == self.mtime_ns


@dataclass(eq=False)
class ShardFile:
    """Reads a shard by position, so that threads can share its file descriptor without a lock.

    Reading a shard that was removed, truncated or replaced after it was indexed raises DataError,
    because images and labels would no longer match.
    """

    path: Path
    stamp: ShardStamp
    retry: Retry
    keep_open: bool

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Readers use duplicates of this descriptor, so that it can be closed at any time.
        self._kept: int | None = None
        self._checked_s = 0.0

    def read(self, offset: int, size: int) -> bytes:
        data = self.retry.read(self.path, lambda: self._read(offset, size))
        if len(data) < size:
            raise DataError(
                f"{self.path}: was truncated to {offset + len(data)} bytes since the start",
                "do not change shards during a run; copy the shard again and resume",
            )
        return data

    def lend(self, *, may_open: bool = True) -> Loan | None:
        """Lends a file descriptor to C code.

        The caller checks `Loan.fits` after reading, because the file may have changed.

        Args:
            may_open: Allows opening the file if it is not kept open.

        Returns:
            The descriptor. None if the file must not be opened, or after an error, which `read`
            then retries or reports.
        """
        if not (self.keep_open or may_open):
            return None
        try:
            descriptor = self._open()
        except OSError:
            return None
        try:
            self._check_name(descriptor)
        except (OSError, DataError):
            os.close(descriptor)
            return None
        return Loan(descriptor, self.stamp, extra=not self.keep_open)

    def _open(self) -> int:
        """Returns an open descriptor of the shard. The caller closes the descriptor."""
        if not self.keep_open:
            return regular_descriptor(self.path)
        with self._lock:
            if self._kept is None:
                self._kept = regular_descriptor(self.path)
            return os.dup(self._kept)

    def _read(self, offset: int, size: int) -> bytes:
        descriptor = self._open()
        try:
            self._check_name(descriptor)
            return self._checked(descriptor, offset, size)
        except OSError:
            # A stale handle of a network file system stays invalid, so the next try opens the file again.
            self.close()
            raise
        finally:
            os.close(descriptor)

    def _checked(self, descriptor: int, offset: int, size: int) -> bytes:
        data = _pread(descriptor, offset, size)
        # For a file truncated before these bytes, `read` has a more precise message.
        if len(data) == size and not self.stamp.fits(os.fstat(descriptor)):
            raise self._changed()
        return data

    def _check_name(self, descriptor: int) -> None:
        """Raises DataError if the shard was replaced by another file while it was open."""
        now = time.monotonic()
        if not self.keep_open or now - self._checked_s < _CHECK_EVERY_S:
            return
        status = self.path.stat()
        if not self.stamp.fits(status) and status.st_ino != os.fstat(descriptor).st_ino:
            raise self._changed()
        # Set last, so that after an error the next reader checks again.
        self._checked_s = now

    def _changed(self) -> DataError:
        return DataError(
            f"{self.path}: was changed or replaced since the start",
            "do not change shards during a run; restore the shard and resume",
        )

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            os.close(kept)


@dataclass(frozen=True)
class Loan:
    """A file descriptor that stays open until `give_back`.

    `extra` is True if the file was opened only for this loan.
    """

    descriptor: int
    stamp: ShardStamp
    extra: bool

    def fits(self, size: int, mtime_ns: int) -> bool:
        return (size, mtime_ns) == (self.stamp.size, self.stamp.mtime_ns)

    def give_back(self) -> None:
        os.close(self.descriptor)


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    """Reads `size` bytes, or fewer at the end of the file. One system call may return fewer bytes."""
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
        "check that the data directory exists, is mounted and is readable",
    )


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Holds a lock that excludes other processes of this host.

    Args:
        path: The lock file. Created if it does not exist.
        wait: Waits while another process holds the lock.

    Yields:
        True if this process holds the lock. False if another process holds it and `wait` is False.
        None if the file system has no locks, or the directory is read-only.
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
    """Writes a file atomically. Raises DataError if writing fails."""
    with written_file(path) as file:
        file.write(content)


@contextmanager
def written_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for atomic writing by `whole_file`. Raises DataError if writing fails."""
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
