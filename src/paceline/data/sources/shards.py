"""Data sets in tars: `TarShards`, in the WebDataset layout, and `TarredImages`, as ImageNet is published.

A plain tar is read where it lies, by any number of threads at once; a compressed shard is unpacked into
memory, which suits small sets such as the embedded one.

`TarredImages` takes `ILSVRC2012_img_train.tar`, which holds a tar for each class, a folder of these inner
tars, or the flat `ILSVRC2012_img_val.tar` with a label file beside it. Opening lists every member;
`paceline pack` does that once.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.order import Int64
from paceline.data.sources.base import Extent, FileFacts, Source
from paceline.data.sources.folders import is_image, known_classes, label_file
from paceline.data.sources.index_store import IndexStore
from paceline.data.sources.labels import CLASSES_FILE, numbered_classes, read_flat_labels
from paceline.data.sources.storage import Retry, ShardFile, ShardStamp, unreadable
from paceline.data.sources.tar_index import (
    LABEL_EXTENSION,
    FileWindow,
    NameTable,
    ShardIndex,
    scan_shard,
    stamp_of,
    tar_members,
)

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# A process may usually hold 1024 descriptors; shards beyond these are opened for each read.
_DESCRIPTORS_KEPT = 256
_COMPRESSED_LIMIT_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20


class UnpackedShard:
    """A compressed shard, in memory; DataError where it would take more than `limit_bytes`."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        try:
            # Piece by piece: a small file can unpack to any size.
            pieces, size = [], 0
            with open_regular(path) as raw, gzip.open(raw) as file:
                while size <= limit_bytes and (piece := file.read(_PIECE_BYTES)):
                    pieces.append(piece)
                    size += len(piece)
            self.data = b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: not a readable gzip file ({error})", "copy or build the shard anew"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from None
        if len(self.data) > limit_bytes:
            raise DataError(
                f"{path}: unpacks to more than {limit_bytes / 2**30:.1f} GiB, all that compressed "
                "shards may still take of each rank's memory",
                "decompress them with gunzip; plain .tar shards are read where they lie",
            )

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        self.data = b""


class TarShards(Source):
    """Samples in the order of the shards' names, then in the order inside each shard."""

    retry: Retry

    def __init__(
        self,
        paths: Sequence[Path],
        classes: Sequence[str] | None = None,
        retry: Retry | None = None,
        keep_index: bool = True,
        indexes: Sequence[tuple[ShardStamp, ShardIndex]] | None = None,
    ) -> None:
        """Finds or makes the index of every shard; one that is damaged or wrongly labelled fails
        by name. Without `keep_index` what was made is not written anywhere. `indexes`, where they are
        known, are those of `paths`, which are plain shards and in order."""
        self._paths = sorted(paths)
        self._known = indexes
        self.retry = retry or Retry(0)
        self._store = IndexStore(self.retry, keep_index)
        self._notes: list[str] = []
        self._contents: list[ShardFile | UnpackedShard] = []
        self._indexes: list[ShardIndex] = []
        self._digest = hashlib.sha256()
        if indexes is None:
            _check_compressed(self._paths)
        self._open()
        self.shard_sizes = [len(index) for index in self._indexes]
        self._first: list[int] = np.cumsum([0, *self.shard_sizes]).tolist()
        if not self._first[-1]:
            raise DataError(
                f"{self._paths[0] if self._paths else 'no shard'}: no image in any of "
                f"{len(self._paths)} shards",
                "samples are key.jpg (jpeg, png, webp) and key.cls, no other dot in the key",
            )
        self.labels = np.concatenate([index.labels for index in self._indexes])
        highest = int(self.labels.max())
        self.classes: Sequence[str] = numbered_classes(highest + 1) if classes is None else classes
        if highest >= len(self.classes):
            self._reject_label(int(np.argmax(self.labels >= len(self.classes))))

    def _open(self) -> None:
        plain = [path for path in self._paths if not _is_compressed(path)]
        self.has_extents = bool(plain)
        self._stamps: list[ShardStamp] = []
        taken = self._store.take(plain) if self._known is None else self._known
        indexed = dict(zip(plain, taken, strict=True))
        left = _COMPRESSED_LIMIT_BYTES
        for path in self._paths:
            if path in indexed:
                stamp, index = indexed[path]
                keep_open = len(self._contents) < _DESCRIPTORS_KEPT
                self._contents.append(ShardFile(path, stamp, self.retry, keep_open))
                self._indexes.append(index)
                self._stamps.append(stamp)
                state = f"{path.name}\0{stamp.size}\0{stamp.mtime_ns}\0".encode() + stamp.probe
            else:
                unpacked = UnpackedShard(path, left)
                left -= len(unpacked.data)
                self._contents.append(unpacked)
                self._indexes.append(scan_shard(path, io.BytesIO(unpacked.data)))
                state = hashlib.sha256(unpacked.data).digest()
            self._digest.update(state)

    def _reject_label(self, i: int) -> None:
        raise DataError(
            f"{self.name(i)}: label {self.labels[i]} is outside the {len(self.classes)} classes",
            f"fix the .cls file, or name the class in {CLASSES_FILE}",
        )

    @property
    def note(self) -> str:
        """What was done about the indexes, and what `add_note` added."""
        notes = self._store.notes
        more = f" and {len(notes) - 1} more" if notes[1:] else ""
        return "; ".join([*self._notes, *(f"{note}{more}" for note in notes[:1])])

    def add_note(self, text: str) -> None:
        self._notes.append(text)

    def file_facts(self) -> FileFacts | None:
        if len(self._stamps) < len(self._paths):
            return None  # compressed shards are in each rank's own memory
        names = [index.names.parts for index in self._indexes]
        letters = b"".join(part for _, part in names)
        arrays = ShardStamp.to_arrays(self._stamps) | {
            "counts": np.array(self.shard_sizes, dtype=np.int64),
            "offsets": np.concatenate([index.offsets for index in self._indexes]),
            "sizes": np.concatenate([index.sizes for index in self._indexes]),
            "labels": self.labels,
            "ends": np.concatenate([ends for ends, _ in names]),
            "letters": np.frombuffer(letters, dtype=np.uint8),
        }
        about = {"paths": [str(path) for path in self._paths], "classes": list(self.classes)}
        return FileFacts("shards", arrays, about)

    @classmethod
    def from_facts(cls, facts: FileFacts, retry: Retry) -> TarShards:
        arrays = facts.arrays
        letters = arrays["letters"].tobytes()
        indexes, sample, end, letter = [], 0, 0, 0
        for count, stamp in zip(
            arrays["counts"].tolist(), ShardStamp.from_arrays(arrays), strict=True
        ):
            here = slice(sample, sample + count)
            ends = arrays["ends"][end : end + count + 1]
            names = NameTable.from_parts(ends, letters[letter : letter + int(ends[-1])])
            index = ShardIndex(
                names, arrays["offsets"][here], arrays["sizes"][here], arrays["labels"][here]
            )
            indexes.append((stamp, index))
            sample, end, letter = sample + count, end + count + 1, letter + int(ends[-1])
        paths = [Path(path) for path in facts.about["paths"]]
        return cls(paths, facts.about["classes"], retry, indexes=indexes)

    def identity(self) -> bytes:
        """Changes with every shard that is changed."""
        return self._digest.digest()

    def __len__(self) -> int:
        return self._first[-1]

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard = bisect.bisect_right(self._first, i) - 1
        return shard, i - self._first[shard]

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the shard itself can no longer be read."""
        shard, place = self._locate(i)
        index = self._indexes[shard]
        return self._contents[shard].read(int(index.offsets[place]), int(index.sizes[place]))

    def extent(self, i: int) -> Extent | None:
        """Where the encoded image lies, None where it is in no file of its own bytes."""
        shard, place = self._locate(i)
        content, index = self._contents[shard], self._indexes[shard]
        if not isinstance(content, ShardFile):
            return None
        return content, int(index.offsets[place]), int(index.sizes[place])

    def sizes(self) -> Int64:
        return np.concatenate([index.sizes for index in self._indexes])

    def name(self, i: int) -> str:
        shard, place = self._locate(i)
        return f"{self._paths[shard].name}:{self._indexes[shard].names[place]}"

    def close(self) -> None:
        for content in self._contents:
            content.close()


def _check_compressed(paths: Sequence[Path]) -> None:
    try:
        total = sum(path.stat().st_size for path in paths if _is_compressed(path))
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    if total > _COMPRESSED_LIMIT_BYTES:
        raise DataError(
            f"{paths[0].parent}: {total / 2**30:.1f} GiB of compressed shards, which each rank "
            f"would hold in memory (limit {_COMPRESSED_LIMIT_BYTES >> 30} GiB)",
            "decompress them with gunzip; plain .tar shards are read where they lie",
        )


def _is_compressed(path: Path) -> bool:
    return path.name.endswith("gz")


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
            ShardFile(path, stamp, self.retry, keep_open=number < _DESCRIPTORS_KEPT)
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
