"""`TarredImages`: images in tars, as ImageNet is published.

Reads `ILSVRC2012_img_train.tar`, which contains a tar per class, a folder of these inner tars, or
the flat `ILSVRC2012_img_val.tar` with a label file next to it. Opening lists all members. `paceline
pack` does that only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.sources.folders import is_image, known_classes, label_file
from paceline.data.sources.labels import read_flat_labels
from paceline.data.sources.shards import TarImages, files_on_disk
from paceline.data.sources.storage import Retry, ShardStamp
from paceline.data.sources.tar_index import (
    LABEL_EXTENSION,
    FileWindow,
    NameTable,
    stamp_of,
    tar_members,
)

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"


class _Place(NamedTuple):
    """The place of an image: number of the file, offset and size; and its name and class."""

    file: int
    offset: int
    size: int
    name: str
    class_name: str


class TarredImages(TarImages):
    """Images in tars. Samples have the order of class, then of name."""

    FACTS = "tars"

    @classmethod
    def of(
        cls,
        stamps: Mapping[Path, ShardStamp],
        places: Sequence[_Place],
        labels: Sequence[int],
        classes: Sequence[str],
        retry: Retry,
    ) -> Self:
        """Creates a source. `stamps` are the state of the tars before they were listed."""
        numbers = [(place.file, place.offset, place.size) for place in places]
        return cls(
            files_on_disk(stamps.items(), retry), np.array(numbers, dtype=np.int64),
            NameTable(place.name for place in places), np.array(labels, dtype=np.int64), classes,
            retry,
        )  # fmt: skip

    def identity(self) -> bytes:
        ends, letters = self._names.parts
        digest = hashlib.sha256(ends.tobytes() + letters)
        for file in self._files:
            assert file.stamp is not None
            digest.update(f"{file.stamp.size}\0{file.stamp.mtime_ns}\0".encode())
            digest.update(file.stamp.probe)
        return digest.digest()


def open_class_tars(
    paths: Sequence[Path], classes: Sequence[str] | None, retry: Retry | None = None
) -> TarredImages:
    """Opens one tar per class, or one tar of such tars.

    Args:
        paths: The tars.
        classes: Classes of the training split, if they are known.
        retry: Repeats reads after temporary errors.

    Raises:
        DataError: If a tar has no image, which would shift the labels, or if a class is unknown.
    """
    paths, retry = sorted(paths), retry or Retry(0)
    # Before the tars are listed, so that a tar that changes meanwhile does not match its stamp.
    stamps = {path: stamp_of(path, retry) for path in paths}
    places: list[_Place] = []
    for number, path in enumerate(paths):
        places += _listed(path, number, retry)
    present = sorted({place.class_name for place in places})
    names = present if classes is None else classes
    index = {name: i for i, name in enumerate(names)}
    for name in present:
        if name not in index:
            raise DataError(
                f"{paths[0].parent}: {name}.tar: not a class of the training data",
                "remove it, or add the class to the training split",
            )
    places.sort(key=lambda place: (place.class_name, place.name))
    return TarredImages.of(stamps, places, [index[p.class_name] for p in places], names, retry)


def open_flat_tar(
    path: Path, classes: Sequence[str] | None, retry: Retry | None = None
) -> TarredImages:
    """Opens a tar of images with a label file next to it.

    Args:
        path: The tar.
        classes: Names of the classes.
        retry: Repeats reads after temporary errors.

    Raises:
        DataError: If images, classes or labels are missing.
    """
    retry = retry or Retry(0)
    stamps = {path: stamp_of(path, retry)}
    places = sorted(_listed(path, 0, retry), key=lambda place: place.name)
    known = known_classes(path, classes)
    labels = read_flat_labels(label_file(path), [place.name for place in places], known)
    return TarredImages.of(stamps, places, labels, known, retry)


def _listed(path: Path, number: int, retry: Retry) -> list[_Place]:
    def scan() -> list[_Place]:
        with open_regular(path) as content:
            if path.name != TRAIN_TAR:
                return _images(path, number, content, path.stem, 0)
            places: list[_Place] = []
            for member in tar_members(path, content):
                if member.name.endswith(".tar"):
                    inner = FileWindow(content, member.offset_data, member.size)
                    name = Path(member.name).stem
                    places += _images(path, number, inner, name, member.offset_data)
            if not places:
                raise _empty(path)
            return places

    return retry.read(path, scan)


def _images(
    path: Path, number: int, content: BinaryIO, class_name: str, start: int
) -> list[_Place]:
    places = []
    for member in tar_members(path, content):
        name = member.name.rpartition("/")[2]
        if name.lower().endswith(f".{LABEL_EXTENSION}"):
            raise DataError(
                f"{path}: {name} is a label, so this is a shard and not the images of one class",
                "set data.source = 'shards'",
            )
        if is_image(name):
            offset = start + member.offset_data
            places.append(_Place(number, offset, member.size, name, class_name))
    if not places:
        raise _empty(f"{path}: {class_name}.tar" if start else path)
    return places


def _empty(path: Path | str) -> DataError:
    return DataError(f"{path}: no image in it", "fetch the archive again")
