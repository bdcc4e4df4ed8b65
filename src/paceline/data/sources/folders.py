"""Images in separate files.

`ImageFolder` reads class folders, `FlatFolder` reads one folder with a label file, and
`MetadataFolder` reads a folder with Hugging Face's metadata.

`ImageFolder` reads `DIR/<split>/<class>/…/name.jpg`. The index of a class is the position of its
name among the sorted names of the training split. Hidden files are ignored. Other files that are
not images, and classes without images, are skipped with a note.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import read_regular
from paceline.data.order import Int64
from paceline.data.sources.base import Source
from paceline.data.sources.labels import (
    FILE_NAMES,
    find_label_file,
    find_metadata,
    first_row,
    metadata_labels,
    read_flat_labels,
    read_metadata,
)
from paceline.data.sources.storage import Retry
from paceline.data.sources.tar_index import IMAGE_EXTENSIONS, NameTable

# More suffixes than in shards, because files come from cameras, scanners and web pages.
IMAGE_SUFFIXES = (*(f".{extension}" for extension in IMAGE_EXTENSIONS), ".jfif", ".bmp", ".gif")
_SEARCHED_FOLDERS = 1000
_NAMED = 5
# `stat` on a network file system takes a millisecond, nearly all of which is waiting.
_STAT_THREADS = 16
# Files per task. One task per file would take gigabytes for a million files.
_STATS = 1024


class ImageFiles(Source):
    """Base class of sources with one file per image. Files are opened for each read."""

    retry: Retry

    def __init__(
        self,
        root: Path,
        paths: Iterable[str],
        labels: Sequence[int] | Int64,
        classes: Sequence[str],
        retry: Retry | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._root = root
        self._notes = list(notes)
        self._paths = NameTable(paths)
        self.labels = np.array(labels, dtype=np.int64)
        self.classes: Sequence[str] = classes
        self.retry = retry or Retry(0)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> bytes:
        """Returns the bytes of image file `i`. Raises DataError if the file cannot be read."""
        path = self._root / self._paths[i]
        return self.retry.read(path, partial(read_regular, path))

    def name(self, i: int) -> str:
        return str(self._root / self._paths[i])

    @property
    def note(self) -> str:
        return "; ".join(self._notes)

    def add_note(self, text: str) -> None:
        self._notes.append(text)

    def identity(self) -> bytes:
        """Returns a hash of the names, sizes and modification times of all files.

        A million files take seconds.
        """
        ends, letters = self._paths.parts
        digest = hashlib.sha256(ends.tobytes() + letters)
        with ThreadPoolExecutor(_STAT_THREADS, thread_name_prefix="paceline-data-stat") as pool:
            for part in pool.map(self._stats, range(0, len(self), _STATS)):
                digest.update(part)
        return digest.digest()

    def _stats(self, start: int) -> bytes:
        """Returns sizes and modification times of `_STATS` files, from number `start` on."""
        parts = []
        for i in range(start, min(start + _STATS, len(self))):
            path = f"{self._root}/{self._paths[i]}"
            status = self.retry.read(path, partial(os.stat, path))
            parts.append(b"%d %d\0" % (status.st_size, status.st_mtime_ns))
        return b"".join(parts)


def is_image(name: str) -> bool:
    """Returns True for names of images, except hidden ones such as the `._name` files of macOS."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


class ImageFolder(ImageFiles):
    """Images in class folders. Samples are sorted by class, then by path."""

    def __init__(
        self, root: Path, classes: Sequence[str] | None = None, retry: Retry | None = None
    ) -> None:
        """Lists the images.

        Args:
            root: The folder of the split, which contains the class folders.
            classes: Class names of the training split. Any other folder with images is an error.
            retry: Repeats reads after temporary errors.

        Raises:
            DataError: If there is no image, or if a class is unknown.
        """
        folders = class_directories(root)
        if not folders:
            raise DataError(f"{root}: no class directories", "put images into <class>/ below it")
        skipped: list[str] = []
        images = {name: sorted(_images(root, name, skipped)) for name in folders}
        empty = [name for name in folders if not images[name]]
        if len(empty) == len(folders):
            raise DataError(
                f"{root}: no image ({', '.join(IMAGE_SUFFIXES)}) in any of {len(folders)} class "
                f"directories: {_some(empty)}{f'; files: {_some(skipped)}' if skipped else ''}",
                "put images into <class>/ below it; convert other formats, such as TIFF, to PNG",
            )
        filled = [name for name in folders if images[name]]
        classes = filled if classes is None else classes
        number = {name: index for index, name in enumerate(classes)}
        paths: list[str] = []
        labels: list[int] = []
        for name in filled:
            if name not in number:
                raise DataError(
                    f"{root / name}: not a class of the training data "
                    f"({len(classes)} classes: {', '.join(classes[:3])} …)",
                    "remove the directory, or add the class to the training split",
                )
            paths += images[name]
            labels += [number[name]] * len(images[name])
        notes = [f"{root.name}/: no image in {_some(empty)}"] if empty else []
        if skipped:
            notes.append(
                f"{root.name}/: skipped {len(skipped)} files that are not images: {_some(skipped)}"
            )
        if loose := flat_images(root):
            notes.append(f"{root.name}/: skipped images outside of class folders: {_some(loose)}")
        super().__init__(root, paths, labels, classes, retry, notes)


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}"


def class_directories(root: Path) -> list[str]:
    """Returns the sorted names of visible subdirectories, including links to directories."""
    return _names(root, lambda entry: entry.is_dir() and not entry.name.startswith("."))


def flat_images(root: Path) -> list[str]:
    """Returns the sorted names of the images in `root` itself."""
    return _names(root, lambda entry: is_image(entry.name) and entry.is_file())


def _names(root: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if wanted(entry))
    except OSError as error:
        raise DataError(f"{root}: cannot be listed ({error.strerror})", "check the path") from None


def has_images(root: Path, name: str) -> bool:
    """Returns True if class folder `name` has images.

    Searches a limited number of folders, because a user may pass `--data-dir /` by mistake.
    """
    return next(_images(root, name, most_folders=_SEARCHED_FOLDERS), None) is not None


def _images(
    root: Path, name: str, skipped: list[str] | None = None, most_folders: int | None = None
) -> Iterator[str]:
    """Yields the paths, relative to `root`, of all images below one class folder.

    A directory is read only once, even if several links lead to it or links form cycles. The paths
    of visible files that are no images are added to `skipped`.
    """
    seen = {_inode(root)}

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot be listed ({error.strerror})", "check its permissions"
        )

    walk = os.walk(root / name, onerror=fail, followlinks=True)
    for folder, below, files in itertools.islice(walk, most_folders):
        inode = _inode(folder)
        if inode in seen:
            below.clear()
            continue
        seen.add(inode)
        # Sorted, because the first link that leads to a directory determines its paths.
        below[:] = sorted(entry for entry in below if not entry.startswith("."))
        for file in files:
            path = os.path.relpath(os.path.join(folder, file), root)  # noqa: PTH118
            if is_image(file):
                yield path
            elif skipped is not None and not file.startswith("."):
                skipped.append(path)


def _inode(folder: Path | str) -> tuple[int, int]:
    try:
        status = os.stat(folder)  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})", "check it") from None
    return status.st_dev, status.st_ino


class FlatFolder(ImageFiles):
    """Images in one folder, with labels from a label file."""

    def __init__(
        self, root: Path, classes: Sequence[str] | None, retry: Retry | None = None
    ) -> None:
        names = flat_images(root)
        if not names:
            raise DataError(f"{root}: no image in it", "put images, or class folders, into it")
        path = find_label_file(root)
        if path is None:
            raise DataError(
                f"{root}: images without class folders, and no file with their labels",
                f"put one of {', '.join(FILE_NAMES)} next to it",
            )
        if classes is None:
            raise DataError(
                f"{root}: has a label file, but the names of the classes are unknown",
                "put the training split, or classes.json, next to it",
            )
        super().__init__(root, names, read_flat_labels(path, names, classes), classes, retry)


class MetadataFolder(ImageFiles):
    """Hugging Face's `imagefolder` with metadata, whose rows contain a file name and a label."""

    def __init__(
        self, root: Path, classes: Sequence[str] | None, retry: Retry | None = None
    ) -> None:
        path = find_metadata(root)
        assert path is not None
        rows = read_metadata(path)
        labels, names = metadata_labels(path, [label for _, label in rows], classes)
        for number, (name, _) in enumerate(rows, start=first_row(path)):
            if not (root / name).is_file():
                raise DataError(
                    f"{path}: row {number}: no file {name!r}", "add it, or remove the row"
                )
        super().__init__(root, [name for name, _ in rows], labels, names, retry)
