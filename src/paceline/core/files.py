"""Reads regular files, writes files atomically, and locates the user's cache folder.

A file gets its final name after its bytes have reached the disk. Until then, the file has a hidden name
in the same folder, and a failure removes the file. Callers explain errors of the operating system.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_TOKEN_BYTES = 8
# Pattern of the hidden names, which a killed process leaves behind.
LEFTOVERS = f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.tmp"
# No document or encoded image is larger; reading a file must not take all memory.
LARGEST_BYTES = 1 << 30
# Errors of a directory that may not be read, and of a file system that cannot sync directories.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES})


def regular_descriptor(path: Path | str) -> int:
    """Opens a regular file to read and follows symbolic links.

    Raises:
        OSError: If the path is not a regular file: reading a pipe waits for a writer, and a device
            may have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: Path | str, most_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file of at most `most_bytes`; see `regular_descriptor`."""
    file = os.fdopen(regular_descriptor(path), "rb")
    if most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes:
        file.close()
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return file


def read_regular(path: Path | str, most_bytes: int | None = LARGEST_BYTES) -> bytes:
    """Reads a regular file.

    Args:
        path: The file.
        most_bytes: Largest size; None for no limit.

    Raises:
        OSError: If there is no such file, or if it is larger than the limit or the memory; `strerror` is
            the reason.
    """
    with open_regular(path, most_bytes) as file:
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write and read, which is renamed to `path` if the block succeeds."""
    part = part_path(path)
    try:
        with open_part(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def part_path(path: Path) -> Path:
    """Returns the name of an unfinished file in the folder of `path`.

    The name is random, so that nobody can create a link of that name first and two writers never
    use the same file. The last writer to rename its file wins.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


def open_part(part: Path) -> BinaryIO:
    """Creates a file to write and read; raises OSError if a file or link of that name exists."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(part, flags, 0o666), "w+b")


def user_cache() -> Path | None:
    """Returns the cache folder of this user; None for a user without a home folder.

    A relative XDG_CACHE_HOME is ignored, as its specification demands.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None


def sync_directory(directory: Path) -> None:
    """Flushes a directory to disk, so that a rename in it survives a power failure."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
