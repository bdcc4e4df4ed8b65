"""Files that exist complete or not at all, and the user's cache.

A file gets its name after its bytes have reached the disk; until then it has a hidden name beside it,
which a failure removes. Errors of the operating system pass through: callers explain them to the user.
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
# What whole files are called while they are written; a killed process leaves such.
LEFTOVERS = f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.tmp"
# No document and no encoded image is larger; reading one must not take all memory.
LARGEST_BYTES = 1 << 30
# A directory that may not be read, or a file system that cannot sync one: the rename is as good as it is.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES})


def regular_descriptor(path: Path | str) -> int:
    """Opens a regular file to read; symbolic links are followed.

    Raises OSError for anything else: reading a pipe waits for a writer, and a device may have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits too.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: Path | str, most_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file of at most `most_bytes`, as `regular_descriptor` does."""
    file = os.fdopen(regular_descriptor(path), "rb")
    if most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes:
        file.close()
        raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return file


def read_regular(path: Path | str, most_bytes: int | None = LARGEST_BYTES) -> bytes:
    """Reads a regular file of at most `most_bytes`. Raises OSError, with the reason in `strerror`, for
    everything else, also for a file that is larger than memory."""
    with open_regular(path, most_bytes) as file:
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write and read back; renamed to `path` at the end of the block, if it ends well."""
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
    """A name beside `path` for what is half-written. Nobody can guess it and lay a link there first,
    and two writers of one name never meet: the last one to rename wins."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


def open_part(part: Path) -> BinaryIO:
    """A new file, to write and read back. OSError where there is one already, or a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(part, flags, 0o666), "w+b")


def user_cache() -> Path | None:
    """Where this user's programs keep what can be made again; None for a user without a home, as
    containers have them. A relative XDG_CACHE_HOME counts as none, as its specification wants it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None


def sync_directory(directory: Path) -> None:
    """Makes a rename in it last through a power cut."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
