"""Files that are there whole or not at all.

In: a path and its content, at once or piece by piece. Out: the file under its own name, after its bytes
have reached the disk; until then it has a hidden name beside it, and none after a failure.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from paceline.core.errors import DataError


def write_file(path: Path, content: bytes) -> None:
    """DataError where the disk does not take it."""
    with written_file(path) as file:
        file.write(content)


@contextmanager
def written_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write and read back; renamed to `path` at the end of the block, if it ends well."""
    part = part_path(path)
    try:
        with open_part(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def part_path(path: Path) -> Path:
    """A name beside `path` for what is half-written. Nobody can guess it and lay a link there first,
    and two writers of one name never meet: the last one to rename wins."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def open_part(part: Path) -> BinaryIO:
    """A new file, to write and read back. OSError where there is one already, or a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(part, flags, 0o666), "w+b")


def sync_directory(directory: Path) -> None:
    """Makes a rename last. Some file systems cannot; then the rename is as good as they are."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unwritable(path: Path, error: OSError) -> DataError:
    remedy = "check the directory and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space, then repeat the command"
    return DataError(f"{path}: cannot be written ({error.strerror or error})", remedy)
