"""Whole files of a data set: shards, manifests, indexes.

In: a path and its content, at once or piece by piece. Out: the file, or a DataError that says why not.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.core.errors import DataError
from paceline.core.whole_file import whole_file


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
