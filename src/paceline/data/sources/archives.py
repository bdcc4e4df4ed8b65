"""`TarredImages`: images in tars, as ImageNet is published.

It takes `ILSVRC2012_img_train.tar`, which holds a tar for each class, a folder of these inner tars, or
the flat `ILSVRC2012_img_val.tar` with a label file beside it. Opening lists every member; `paceline pack`
does that once.
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
    """Where an image lies: in which file, from where on, how long."""

    file: int
    offset: int
    size: int
    name: str
    class_name: str


class TarredImages(TarImages):
    """Samples in the order of class, then of name."""

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
        """`stamps` are those from before the tars were listed."""
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
    """`<class>.tar` each, or one tar of these. An empty one fails: it would shift the labels."""
    paths, retry = sorted(paths), retry or Retry(0)
    # A tar that changes while it is listed no longer fits its stamp.
    stamps = {path: stamp_of(path, retry) for path in paths}
    places: list[_Place] = []
    for number, path in enumerate(paths):
        places += _listed(path, number, retry)
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
    return TarredImages.of(stamps, places, [index[p.class_name] for p in places], names, retry)


def open_flat_tar(
    path: Path, classes: Sequence[str] | None, retry: Retry | None = None
) -> TarredImages:
    """One tar of images, their classes in a label file beside it."""
    retry = retry or Retry(0)
    stamps = {path: stamp_of(path, retry)}
    places = sorted(_listed(path, 0, retry), key=lambda place: place.name)
    known = known_classes(path, classes)
    # The label file is looked for where it would be for a folder val/ in the tar's place.
    labels = read_flat_labels(label_file(path), [place.name for place in places], known)
    return TarredImages.of(stamps, places, labels, known, retry)


def _listed(path: Path, number: int, retry: Retry) -> list[_Place]:
    def scan() -> list[_Place]:
        with open_regular(path) as content:
            if path.name != TRAIN_TAR:
                found = _images(path, number, content, path.stem, 0)
                if not found:
                    raise _empty(path)
                return found
            places: list[_Place] = []
            for member in tar_members(path, content):
                if member.name.endswith(".tar"):
                    inner = FileWindow(content, member.offset_data, member.size)
                    name = Path(member.name).stem
                    found = _images(path, number, inner, name, member.offset_data)
                    if not found:
                        raise _empty(f"{path}: {member.name}")
                    places += found
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
            place = _Place(number, start + member.offset_data, member.size, name, class_name)
            places.append(place)
    return places


def _empty(path: Path | str) -> DataError:
    return DataError(f"{path}: no image in it", "fetch the archive again")
