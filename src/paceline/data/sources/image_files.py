"""`ImageFiles`: images that are files of their own under one directory.

In: the directory, the files' paths below it, and their labels. Out: encoded images by index.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.randomness import Int64
from paceline.data.sources.name_table import NameTable
from paceline.data.sources.retry import Retry
from paceline.data.sources.tar_index import IMAGE_EXTENSIONS

IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
# A look at a file of a network file system takes a millisecond, nearly all of it waiting.
_LOOKERS = 16
_LOOKS = 1024


class ImageFiles:
    """A source; nothing is opened before it is read."""

    def __init__(
        self,
        root: Path,
        paths: Iterable[str],
        labels: Sequence[int],
        classes: Sequence[str],
        retry: Retry | None = None,
    ) -> None:
        self._root = root
        self._paths = NameTable(paths)
        self.labels: Int64 = np.array(labels, dtype=np.int64)
        self.classes: Sequence[str] = classes
        self.retry = retry or Retry(0)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the file itself can no longer be read."""
        path = self._root / self._paths[i]
        try:
            return self.retry.call(path.read_bytes)
        except OSError as error:
            raise _unreadable(path, error) from None

    def name(self, i: int) -> str:
        return str(self._root / self._paths[i])

    def identity(self) -> bytes:
        """Changes with the name, size or time of any file. It looks at all of them: seconds for a
        million on a local disk, so only who needs it asks."""
        ends, letters = self._paths.parts
        digest = hashlib.sha256(ends.tobytes() + letters)
        starts = range(0, len(self), _LOOKS)
        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="paceline-data-look") as pool:
            for looks in pool.map(self._looks, starts):
                digest.update(looks)
        return digest.digest()

    def _looks(self, start: int) -> bytes:
        """Size and time of the files from `start` on."""
        found = []
        for i in range(start, min(start + _LOOKS, len(self))):
            path = f"{self._root}/{self._paths[i]}"
            try:
                seen = self.retry.call(partial(os.stat, path))
            except OSError as error:
                raise _unreadable(path, error) from None
            found += [seen.st_size, seen.st_mtime_ns]
        return np.array(found, dtype=np.int64).tobytes()

    def close(self) -> None:
        """Nothing is held open between reads."""


def _unreadable(path: Path | str, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror})",
        "check that the data directory is still there and mounted, and its permissions",
    )


def is_image(name: str) -> bool:
    """Hidden files, such as the `._name` twins of macOS, are none."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
