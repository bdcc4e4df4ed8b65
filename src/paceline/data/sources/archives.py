"""`TarredImages`: images in tars, as ImageNet is published.

It takes `ILSVRC2012_img_train.tar`, which holds a tar for each class, a folder of these inner tars, or
the flat `ILSVRC2012_img_val.tar` with a label file beside it. Opening lists every member; `paceline pack`
does that once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.order import Int64
from paceline.data.sources.base import FileFacts, Source
from paceline.data.sources.folders import is_image, known_classes, label_file
from paceline.data.sources.labels import read_flat_labels
from paceline.data.sources.shards import DESCRIPTORS_KEPT
from paceline.data.sources.storage import Retry, ShardFile, ShardStamp
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


class TarredImages(Source):
    """Samples in the order of class, then of name."""

    retry: Retry

    def __init__(
        self,
        stamps: Mapping[Path, ShardStamp],
        places: Sequence[_Place],
        labels: Sequence[int] | Int64,
        classes: Sequence[str],
        retry: Retry,
    ) -> None:
        """`stamps` are those from before the tars were listed."""
        self.retry = retry
        self._paths = list(stamps)
        self._stamps = list(stamps.values())
        self._files = [
            ShardFile(path, stamp, self.retry, keep_open=number < DESCRIPTORS_KEPT)
            for number, (path, stamp) in enumerate(stamps.items())
        ]
        self._places: Int64 = np.array(
            [(place.file, place.offset, place.size) for place in places], dtype=np.int64
        )
        self._names = NameTable(place.name for place in places)
        self.labels = np.array(labels, dtype=np.int64)
        self.classes: Sequence[str] = classes

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the tar itself can no longer be read."""
        file, offset, size = map(int, self._places[i])
        return self._files[file].read(offset, size)

    def sizes(self) -> Int64:
        found: Int64 = self._places[:, 2]
        return found

    def name(self, i: int) -> str:
        return f"{self._paths[int(self._places[i, 0])].name}:{self._names[i]}"

    def file_facts(self) -> FileFacts | None:
        arrays = ShardStamp.to_arrays(self._stamps) | self._names.to_arrays()
        arrays |= {"places": self._places, "labels": self.labels}
        about = {"paths": [str(path) for path in self._paths], "classes": list(self.classes)}
        return FileFacts("tars", arrays, about)

    @classmethod
    def from_facts(cls, facts: FileFacts, retry: Retry) -> TarredImages:
        arrays, about = facts.arrays, facts.about
        stamps = zip(map(Path, about["paths"]), ShardStamp.from_arrays(arrays), strict=True)
        made = cls(dict(stamps), (), arrays["labels"], about["classes"], retry)
        made._places = arrays["places"]
        made._names = NameTable.from_arrays(arrays)
        return made

    def identity(self) -> bytes:
        ends, letters = self._names.parts
        digest = hashlib.sha256(ends.tobytes() + letters)
        for stamp in self._stamps:
            digest.update(f"{stamp.size}\0{stamp.mtime_ns}\0".encode() + stamp.probe)
        return digest.digest()

    def close(self) -> None:
        for file in self._files:
            file.close()


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
    return TarredImages(stamps, places, [index[p.class_name] for p in places], names, retry)


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
    return TarredImages(stamps, places, labels, known, retry)


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
