"""`FlatFolder`: a folder of images whose classes are in a file, as ImageNet's validation set has them.

In: the folder, its label file and the classes. Out: a source, in the order of the files' names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import DataError
from paceline.data.sources.flat_labels import FILE_NAMES, find_label_file, read_flat_labels
from paceline.data.sources.image_files import ImageFiles, is_image
from paceline.data.sources.retry import Retry


class FlatFolder(ImageFiles):
    def __init__(
        self, root: Path, classes: Sequence[str] | None, retry: Retry | None = None
    ) -> None:
        names = flat_images(root)
        if not names:
            raise DataError(f"{root}: no image in it", "put images, or class folders, into it")
        labels = read_flat_labels(label_file(root), names, known_classes(root, classes))
        super().__init__(root, names, labels, known_classes(root, classes), retry)


def flat_images(root: Path) -> list[str]:
    """Sorted names of the images that lie in `root` itself."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if is_image(e.name) and e.is_file())
    except OSError as error:
        raise DataError(f"{root}: cannot be listed ({error.strerror})", "check the path") from None


def label_file(root: Path) -> Path:
    path = find_label_file(root)
    if path is None:
        raise DataError(
            f"{root}: images without class folders, and no file with their labels",
            f"put one of {', '.join(FILE_NAMES)} beside it",
        )
    return path


def known_classes(root: Path, classes: Sequence[str] | None) -> Sequence[str]:
    if classes is None:
        raise DataError(
            f"{root}: its label file gives numbers or names, but nobody says which classes there are",
            "put the training split, or classes.json, beside it",
        )
    return classes
