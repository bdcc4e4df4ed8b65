"""`ImageFolder`: a data set as one directory a class.

In: `DIR/<split>/<class>/…/name.jpg`. Out: encoded images by index; a class is a sub-directory, its
index the place of its name among the sorted names of the training split. Hidden names are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.name_table import NameTable
from paceline.data.randomness import Int64
from paceline.data.tar_index import IMAGE_EXTENSIONS

_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


class ImageFolder:
    """Samples in the order of class, then of path."""

    def __init__(self, root: Path, classes: Sequence[str] | None = None) -> None:
        """Lists `root`; with `classes` given, sub-directories must be among them."""
        here = class_directories(root)
        if not here:
            raise DataError(f"{root}: no class directories", "put images into <class>/ beneath it")
        self.classes: Sequence[str] = here if classes is None else classes
        number = {name: index for index, name in enumerate(self.classes)}
        self._root = root
        paths: list[str] = []
        labels: list[int] = []
        empty = []
        for name in here:
            if name not in number:
                raise DataError(
                    f"{root / name}: not a class of the training data "
                    f"({len(self.classes)} classes: {', '.join(self.classes[:3])} …)",
                    "remove the directory, or add the class to the training split",
                )
            found = sorted(_images(root, name))
            if not found:
                empty.append(name)
            paths += found
            labels += [number[name]] * len(found)
        if empty:
            raise DataError(
                f"{root}: no image ({', '.join(_SUFFIXES)}) in {len(empty)} of {len(here)} class "
                f"directories: {', '.join(empty[:5])}{' …' if len(empty) > 5 else ''}",
                "add images or remove these directories",
            )
        self._paths = NameTable(paths)
        self.labels: Int64 = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the file itself can no longer be read."""
        path = self._root / self._paths[i]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror})",
                "check that the data directory is still there and mounted, and its permissions",
            ) from None

    def name(self, i: int) -> str:
        return str(self._root / self._paths[i])

    def close(self) -> None:
        """Nothing is held open between reads."""


def class_directories(root: Path) -> list[str]:
    """Sorted names of the visible sub-directories; links to directories count."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"{root}: cannot be listed ({error.strerror})", "check the path") from None


def _images(root: Path, name: str) -> Iterator[str]:
    """Paths relative to `root` of all images under one class, however deep."""

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot be listed ({error.strerror})", "check its permissions"
        )

    for folder, below, files in os.walk(root / name, onerror=fail, followlinks=True):
        below[:] = [entry for entry in below if not entry.startswith(".")]
        for file in files:
            if file.lower().endswith(_SUFFIXES) and not file.startswith("."):
                yield os.path.relpath(os.path.join(folder, file), root)  # noqa: PTH118
