"""Images that are files of their own: class folders (`ImageFolder`), one folder with a label file
(`FlatFolder`), or a folder with Hugging Face's metadata (`MetadataFolder`).

`ImageFolder` reads `DIR/<split>/<class>/…/name.jpg`: a class is a sub-directory, and its index is
the place of its name among the sorted names of the training split. Hidden names are skipped; other files
that are not images, and classes without any, are skipped with a note.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import read_regular
from paceline.data.order import Int64
from paceline.data.sources.base import FileFacts, Source
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

# Files, unlike members of shards, come from cameras, scanners and web pages.
IMAGE_SUFFIXES = (*(f".{extension}" for extension in IMAGE_EXTENSIONS), ".jfif", ".bmp", ".gif")
# Images of other formats, which are converted rather than guessed at: TIFFs often have 12 or 16 bits.
_UNREAD_SUFFIXES = (".tif", ".tiff", ".heic", ".avif", ".jp2")
_FOLDERS_LOOKED_AT = 1000
_NAMED = 5
_KINDS = 20
# A look at a file of a network file system takes a millisecond, nearly all of it waiting.
_LOOKERS = 16
_LOOKS = 1024


class ImageFiles(Source):
    """Nothing is opened before it is read."""

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
        self._identity = b""
        self._paths = NameTable(paths)
        self.labels = np.array(labels, dtype=np.int64)
        self.classes: Sequence[str] = classes
        self.retry = retry or Retry(0)

    def file_facts(self) -> FileFacts | None:
        arrays = self._paths.to_arrays() | {"labels": self.labels}
        about = {
            "root": str(self._root), "classes": list(self.classes), "notes": self._notes,
            "identity": self._identity.hex(),
        }  # fmt: skip
        return FileFacts("files", arrays, about)

    @classmethod
    def from_facts(cls, facts: FileFacts, retry: Retry) -> ImageFiles:
        about = facts.about
        made = ImageFiles(
            Path(about["root"]), (), facts.arrays["labels"], about["classes"], retry, about["notes"]
        )
        made._paths = NameTable.from_arrays(facts.arrays)
        made._identity = bytes.fromhex(about["identity"])
        return made

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the file itself can no longer be read."""
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
        """Changes with the name, size or time of any file. It looks at all of them: seconds for a
        million on a local disk, so only who needs it asks, and of a host only one process."""
        if self._identity:
            return self._identity
        ends, letters = self._paths.parts
        digest = hashlib.sha256(ends.tobytes() + letters)
        for looks in self._looks(self._look):
            digest.update(looks.tobytes())
        self._identity = digest.digest()
        return self._identity

    def sizes(self) -> Int64:
        found: Int64 = np.concatenate(list(self._looks(self._look_or_none)))
        return found[:, 0]

    def _looks(self, look: Callable[[int], tuple[int, int]]) -> Iterator[Int64]:
        """What `look` returns for every file, in order, some files at a time."""

        def some(start: int) -> Int64:
            ends = min(start + _LOOKS, len(self))
            return np.array([look(i) for i in range(start, ends)], dtype=np.int64)

        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="paceline-data-look") as pool:
            yield from pool.map(some, range(0, len(self), _LOOKS))

    def _look(self, i: int) -> tuple[int, int]:
        """Size and time of a file."""
        path = f"{self._root}/{self._paths[i]}"
        seen = self.retry.read(path, partial(os.stat, path))
        return seen.st_size, seen.st_mtime_ns

    def _look_or_none(self, i: int) -> tuple[int, int]:
        try:
            return self._look(i)
        except DataError:
            return -1, 0


def is_image(name: str) -> bool:
    """Hidden files, such as the `._name` twins of macOS, are none."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


class ImageFolder(ImageFiles):
    """Samples in the order of class, then of path."""

    def __init__(
        self, root: Path, classes: Sequence[str] | None = None, retry: Retry | None = None
    ) -> None:
        """Lists `root`; with `classes` given, sub-directories with images must be among them."""
        here = class_directories(root)
        if not here:
            raise DataError(f"{root}: no class directories", "put images into <class>/ beneath it")
        passed_over: Counter[str] = Counter()
        images = {name: sorted(_images(root, name, passed_over)) for name in here}
        empty = [name for name in here if not images[name]]
        skipped = _counts(passed_over)
        if len(empty) == len(here):
            raise DataError(
                f"{root}: no image ({', '.join(IMAGE_SUFFIXES)}) in any of {len(here)} class "
                f"directories: {_some(empty)}{f'; skipped {skipped}' if skipped else ''}",
                "put images into <class>/ beneath it",
            )
        filled = [name for name in here if images[name]]
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
            notes.append(f"{root.name}/: skipped {skipped}")
        if loose := flat_images(root):
            notes.append(f"{root.name}/: skipped images outside of class folders: {_some(loose)}")
        super().__init__(root, paths, labels, classes, retry, notes)


def _counts(files: Counter[str]) -> str:
    """Files that are not images, by suffix; empty if there are none."""
    if not files:
        return ""
    ordered = sorted(files.items(), key=lambda item: (-item[1], item[0]))[:_KINDS]
    kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in ordered)
    more = " …" if len(files) > _KINDS else ""
    unread = ", ".join(suffix for suffix in _UNREAD_SUFFIXES if suffix in files)
    hint = f" ({unread}: convert to PNG or JPEG)" if unread else ""
    return f"files that are not images: {kinds}{more}{hint}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}"


def class_directories(root: Path) -> list[str]:
    """Sorted names of the visible sub-directories; links to directories count."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"{root}: cannot be listed ({error.strerror})", "check the path") from None


def has_images(root: Path, name: str) -> bool:
    """Looks into so many folders below it and no more: `--data-dir /` is a mistake, not a search."""
    return next(_images(root, name, most_folders=_FOLDERS_LOOKED_AT), None) is not None


def _images(
    root: Path, name: str, passed_over: Counter[str] | None = None, most_folders: int | None = None
) -> Iterator[str]:
    """Paths relative to `root` of all images under one class, however deep. A directory counts
    once, by whatever links it is reached: links may lead in a circle, or up to all classes.
    `passed_over` counts other files by suffix; hidden ones are not worth a word."""
    seen = {_number(root)}

    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot be listed ({error.strerror})", "check its permissions"
        )

    walk = os.walk(root / name, onerror=fail, followlinks=True)
    for folder, below, files in itertools.islice(walk, most_folders):
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
            elif passed_over is not None and not file.startswith("."):
                passed_over[Path(file).suffix.lower()] += 1


def _number(folder: Path | str) -> tuple[int, int]:
    """By what the file system knows a directory, whatever its name."""
    try:
        found = os.stat(folder)  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})", "check it") from None
    return found.st_dev, found.st_ino


class FlatFolder(ImageFiles):
    def __init__(
        self, root: Path, classes: Sequence[str] | None, retry: Retry | None = None
    ) -> None:
        names = flat_images(root)
        if not names:
            raise DataError(f"{root}: no image in it", "put images, or class folders, into it")
        labels = read_flat_labels(label_file(root), names, known_classes(root, classes))
        super().__init__(root, names, labels, known_classes(root, classes), retry)


class MetadataFolder(ImageFiles):
    """Hugging Face's `imagefolder` with metadata: a file name and a label in each row."""

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
