"""`ImageFolder`: a data set as one directory a class.

In: `DIR/<split>/<class>/…/name.jpg`. Out: encoded images by index; a class is a sub-directory, its
index the place of its name among the sorted names of the training split. Hidden names are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.errors import DataError
from paceline.data.sources.image_files import IMAGE_SUFFIXES, ImageFiles, is_image
from paceline.data.sources.retry import Retry


class ImageFolder(ImageFiles):
    """Samples in the order of class, then of path."""

    def __init__(
        self, root: Path, classes: Sequence[str] | None = None, retry: Retry | None = None
    ) -> None:
        """Lists `root`; with `classes` given, sub-directories must be among them."""
        here = class_directories(root)
        if not here:
            raise DataError(f"{root}: no class directories", "put images into <class>/ beneath it")
        classes = here if classes is None else classes
        number = {name: index for index, name in enumerate(classes)}
        paths: list[str] = []
        labels: list[int] = []
        empty = []
        for name in here:
            if name not in number:
                raise DataError(
                    f"{root / name}: not a class of the training data "
                    f"({len(classes)} classes: {', '.join(classes[:3])} …)",
                    "remove the directory, or add the class to the training split",
                )
            found = sorted(_images(root, name))
            if not found:
                empty.append(name)
            paths += found
            labels += [number[name]] * len(found)
        if empty:
            raise DataError(
                f"{root}: no image ({', '.join(IMAGE_SUFFIXES)}) in {len(empty)} of {len(here)} class "
                f"directories: {', '.join(empty[:5])}{' …' if len(empty) > 5 else ''}",
                "add images or remove these directories",
            )
        super().__init__(root, paths, labels, classes, retry)


def class_directories(root: Path) -> list[str]:
    """Sorted names of the visible sub-directories; links to directories count."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"{root}: cannot be listed ({error.strerror})", "check the path") from None


def _images(root: Path, name: str) -> Iterator[str]:
    """Paths relative to `root` of all images under one class, however deep. A directory counts once,
    by whatever links it is reached: links may lead in a circle, or up to all classes."""
    seen = {_number(root)}

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot be listed ({error.strerror})", "check its permissions"
        )

    for folder, below, files in os.walk(root / name, onerror=fail, followlinks=True):
        number = _number(folder)
        if number in seen:
            below.clear()
            continue
        seen.add(number)
        # In one order everywhere: by which name a directory is reached first decides about paths.
        below[:] = sorted(entry for entry in below if not entry.startswith("."))
        for file in files:
            if is_image(file):
                yield os.path.relpath(os.path.join(folder, file), root)  # noqa: PTH118


def _number(folder: Path | str) -> tuple[int, int]:
    """By what the file system knows a directory, whatever its name."""
    try:
        found = os.stat(folder)  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})", "check it") from None
    return found.st_dev, found.st_ino
