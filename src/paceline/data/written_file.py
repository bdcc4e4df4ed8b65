"""Files that are there whole or not at all.

In: a path and its content, at once or piece by piece. Out: the file under its own name, after its bytes
have reached the disk; until then it has a hidden name beside it, and none after a failure.
"""

from __future__ import annotations

import errno
import os
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
    # The process's number keeps two writers of one name apart; the last one to rename wins.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w+b") as file:
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
