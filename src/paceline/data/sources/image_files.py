"""`ImageFiles`: images that are files of their own under one directory.

In: the directory, the files' paths below it, and their labels. Out: encoded images by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.randomness import Int64
from paceline.data.sources.name_table import NameTable
from paceline.data.sources.retry import Retry
from paceline.data.sources.tar_index import IMAGE_EXTENSIONS

IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


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
            raise DataError(
                f"{path}: cannot be read ({error.strerror})",
                "check that the data directory is still there and mounted, and its permissions",
            ) from None

    def name(self, i: int) -> str:
        return str(self._root / self._paths[i])

    def identity(self) -> bytes:
        """Changes with the names of the files; a file that is changed in place is not noticed."""
        return hashlib.sha256(self._paths.parts[1]).digest()

    def close(self) -> None:
        """Nothing is held open between reads."""


def is_image(name: str) -> bool:
    """Hidden files, such as the `._name` twins of macOS, are none."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
