"""`TarredImages`: images in plain tars, as ImageNet is published.

In: `ILSVRC2012_img_train.tar`, which holds a tar for each class, or a folder of these inner tars, or
`ILSVRC2012_img_val.tar`, flat, with a label file beside it. Out: encoded images by index, read where they
lie: nothing is unpacked. Opening lists every member; `paceline pack` does that once and for all.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.data.randomness import Int64
from paceline.data.sources.flat_folder import known_classes, label_file
from paceline.data.sources.flat_labels import read_flat_labels
from paceline.data.sources.image_files import is_image
from paceline.data.sources.name_table import NameTable
from paceline.data.sources.retry import Retry
from paceline.data.sources.shard_file import ShardFile, unreadable
from paceline.data.sources.shard_stamp import ShardStamp
from paceline.data.sources.tar_index import tar_members

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_DESCRIPTORS_KEPT = 256


class _Place(NamedTuple):
    """Where an image lies: in which file, from where on, how long."""

    file: int
    offset: int
    size: int
    name: str
    class_name: str


class TarredImages:
    """Samples in the order of class, then of name."""

    def __init__(
        self,
        paths: Sequence[Path],
        places: Sequence[_Place],
        labels: Sequence[int],
        classes: Sequence[str],
        retry: Retry | None = None,
    ) -> None:
        self.retry = retry or Retry(0)
        self._paths = list(paths)
        self._stamps = [_stamp(path, self.retry) for path in paths]
        self._files = [
            ShardFile(path, stamp, self.retry, keep_open=number < _DESCRIPTORS_KEPT)
            for number, (path, stamp) in enumerate(zip(paths, self._stamps, strict=True))
        ]
        self._places: Int64 = np.array(
            [(place.file, place.offset, place.size) for place in places], dtype=np.int64
        )
        self._names = NameTable(place.name for place in places)
        self.labels: Int64 = np.array(labels, dtype=np.int64)
        self.classes: Sequence[str] = classes

    def __len__(self) -> int:
        return len(self._names)

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the tar itself can no longer be read."""
        file, offset, size = map(int, self._places[i])
        return self._files[file].read(offset, size)

    def name(self, i: int) -> str:
        return f"{self._paths[int(self._places[i, 0])].name}:{self._names[i]}"

    def identity(self) -> bytes:
        digest = hashlib.sha256(self._names.parts[1])
        for stamp in self._stamps:
            digest.update(f"{stamp.size}\0{stamp.mtime_ns}\0".encode() + stamp.probe)
        return digest.digest()

    def close(self) -> None:
        """Gives the descriptors back; no read may be in progress."""
        for file in self._files:
            file.close()


def open_class_tars(
    paths: Sequence[Path], classes: Sequence[str] | None, retry: Retry | None = None
) -> TarredImages:
    """`<class>.tar` each, or one tar of these."""
    paths = sorted(paths)
    places: list[_Place] = []
    for number, path in enumerate(paths):
        places += _listed(path, number, retry)
    if not places:
        raise DataError(f"{paths[0]}: no image in it", "fetch the archive again")
    found = sorted({place.class_name for place in places})
    names = found if classes is None else classes
    index = {name: i for i, name in enumerate(names)}
    for name in found:
        if name not in index:
            raise DataError(
                f"{paths[0].parent}: {name}.tar: not a class of the training data",
                "remove it, or add the class to the training split",
            )
    places.sort(key=lambda place: (place.class_name, place.name))
    return TarredImages(paths, places, [index[p.class_name] for p in places], names, retry)


def open_flat_tar(
    path: Path, classes: Sequence[str] | None, retry: Retry | None = None
) -> TarredImages:
    """One tar of images, their classes in a label file beside it."""
    places = sorted(_listed(path, 0, retry), key=lambda place: place.name)
    known = known_classes(path, classes)
    # The label file is looked for where it would be for a folder val/ in the tar's place.
    labels = read_flat_labels(label_file(path), [place.name for place in places], known)
    return TarredImages([path], places, labels, known, retry)


def _listed(path: Path, number: int, retry: Retry | None) -> list[_Place]:
    def scan() -> list[_Place]:
        with path.open("rb") as content:
            if path.name != TRAIN_TAR:
                return list(_images(path, number, content, path.stem, 0))
            places: list[_Place] = []
            for member in tar_members(path, content):
                if member.name.endswith(".tar"):
                    inner = _Window(content, member.offset_data, member.size)
                    name = Path(member.name).stem
                    places += _images(path, number, inner, name, member.offset_data)
            return places

    try:
        return (retry or Retry(0)).call(scan)
    except OSError as error:
        raise unreadable(path, error) from None


def _stamp(path: Path, retry: Retry) -> ShardStamp:
    try:
        return retry.call(lambda: ShardStamp.of(path))
    except OSError as error:
        raise unreadable(path, error) from None


def _images(
    path: Path, number: int, content: BinaryIO, class_name: str, start: int
) -> Iterator[_Place]:
    for member in tar_members(path, content):
        name = member.name.rpartition("/")[2]
        if is_image(name):
            yield _Place(number, start + member.offset_data, member.size, name, class_name)


class _Window(io.BytesIO):
    """A stretch of a file, read as if it were a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {0: 0, 1: self._at, 2: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at
