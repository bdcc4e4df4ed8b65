"""`TarShards`: tar shards in the WebDataset layout, whose indexes are known.

A plain tar is read where it lies, by any number of threads at once; a compressed shard is unpacked into
memory, which suits small sets such as the embedded one. `index_store.open_shards` opens shards of both
kinds.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.order import Int64
from paceline.data.sources.base import Extent, FileFacts, Source
from paceline.data.sources.classes import CLASSES_FILE, numbered_classes
from paceline.data.sources.storage import Retry, ShardFile, ShardStamp, unreadable
from paceline.data.sources.tar_index import NameTable, ShardIndex, scan_shard

# A process may usually hold 1024 descriptors; shards beyond these are opened for each read.
DESCRIPTORS_KEPT = 256
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


@dataclass(frozen=True)
class Shard:
    """One shard that is open. `stamp` is None for one in memory."""

    path: Path
    content: ShardFile | UnpackedShard
    index: ShardIndex
    stamp: ShardStamp | None = None


def shards_on_disk(
    paths: Iterable[Path], indexes: Iterable[tuple[ShardStamp, ShardIndex]], retry: Retry
) -> Iterator[Shard]:
    """Opens plain shards, of which only the first ones keep a descriptor."""
    for number, (path, (stamp, index)) in enumerate(zip(paths, indexes, strict=True)):
        content = ShardFile(path, stamp, retry, keep_open=number < DESCRIPTORS_KEPT)
        yield Shard(path, content, index, stamp)


def shards_in_memory(paths: Sequence[Path]) -> Iterator[Shard]:
    """Unpacks and indexes compressed shards; DataError if they would take too much memory."""
    _check_compressed(paths)
    left = _COMPRESSED_LIMIT_BYTES
    for path in paths:
        unpacked = UnpackedShard(path, left)
        left -= len(unpacked.data)
        yield Shard(path, unpacked, scan_shard(path, io.BytesIO(unpacked.data)))


class TarShards(Source):
    """Samples in the order of the shards, then in the order inside each shard."""

    retry: Retry

    def __init__(
        self,
        shards: Iterable[Shard],
        classes: Sequence[str] | None = None,
        retry: Retry | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """DataError if there is no image, or a label that is not among `classes`."""
        self.retry = retry or Retry(0)
        self._shards = list(shards)
        self._notes = list(notes)
        self.has_extents = any(shard.stamp is not None for shard in self._shards)
        self.shard_sizes = [len(shard.index) for shard in self._shards]
        self._first: list[int] = np.cumsum([0, *self.shard_sizes]).tolist()
        if not self._first[-1]:
            raise DataError(
                f"{self._shards[0].path if self._shards else 'no shard'}: no image in any of "
                f"{len(self._shards)} shards",
                "samples are key.jpg (jpeg, png, webp) and key.cls, no other dot in the key",
            )
        self.labels = np.concatenate([shard.index.labels for shard in self._shards])
        highest = int(self.labels.max())
        self.classes: Sequence[str] = numbered_classes(highest + 1) if classes is None else classes
        if highest >= len(self.classes):
            i = int(np.argmax(self.labels >= len(self.classes)))
            raise DataError(
                f"{self.name(i)}: label {self.labels[i]} is outside the {len(self.classes)} classes",
                f"fix the .cls file, or name the class in {CLASSES_FILE}",
            )

    @property
    def note(self) -> str:
        """What `add_note` added, and what was done about the indexes."""
        return "; ".join(self._notes)

    def add_note(self, text: str) -> None:
        self._notes.insert(0, text)

    def file_facts(self) -> FileFacts | None:
        stamps = [shard.stamp for shard in self._shards if shard.stamp is not None]
        if len(stamps) < len(self._shards):
            return None  # compressed shards are in each rank's own memory
        indexes = [shard.index for shard in self._shards]
        names = [index.names.parts for index in indexes]
        letters = b"".join(part for _, part in names)
        arrays = ShardStamp.to_arrays(stamps) | {
            "counts": np.array(self.shard_sizes, dtype=np.int64),
            "offsets": np.concatenate([index.offsets for index in indexes]),
            "sizes": self.sizes(),
            "labels": self.labels,
            "ends": np.concatenate([ends for ends, _ in names]),
            "letters": np.frombuffer(letters, dtype=np.uint8),
        }
        paths = [str(shard.path) for shard in self._shards]
        return FileFacts("shards", arrays, {"paths": paths, "classes": list(self.classes)})

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
        paths = map(Path, facts.about["paths"])
        return cls(shards_on_disk(paths, indexes, retry), facts.about["classes"], retry)

    def identity(self) -> bytes:
        """Changes with every shard that is changed."""
        digest = hashlib.sha256()
        for shard in self._shards:
            if (stamp := shard.stamp) is not None:
                digest.update(f"{shard.path.name}\0{stamp.size}\0{stamp.mtime_ns}\0".encode())
                digest.update(stamp.probe)
            elif isinstance(shard.content, UnpackedShard):
                digest.update(hashlib.sha256(shard.content.data).digest())
        return digest.digest()

    def __len__(self) -> int:
        return self._first[-1]

    def _locate(self, i: int) -> tuple[Shard, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard = bisect.bisect_right(self._first, i) - 1
        return self._shards[shard], i - self._first[shard]

    def read(self, i: int) -> bytes:
        """The encoded image; DataError where the shard itself can no longer be read."""
        shard, place = self._locate(i)
        index = shard.index
        return shard.content.read(int(index.offsets[place]), int(index.sizes[place]))

    def extent(self, i: int) -> Extent | None:
        """Where the encoded image lies, None where it is in no file of its own bytes."""
        shard, place = self._locate(i)
        if not isinstance(shard.content, ShardFile):
            return None
        return shard.content, int(shard.index.offsets[place]), int(shard.index.sizes[place])

    def sizes(self) -> Int64:
        return np.concatenate([shard.index.sizes for shard in self._shards])

    def name(self, i: int) -> str:
        shard, place = self._locate(i)
        return f"{shard.path.name}:{shard.index.names[place]}"

    def close(self) -> None:
        for shard in self._shards:
            shard.content.close()


def _check_compressed(paths: Sequence[Path]) -> None:
    try:
        total = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    if total > _COMPRESSED_LIMIT_BYTES:
        raise DataError(
            f"{paths[0].parent}: {total / 2**30:.1f} GiB of compressed shards, which each rank "
            f"would hold in memory (limit {_COMPRESSED_LIMIT_BYTES >> 30} GiB)",
            "decompress them with gunzip; plain .tar shards are read where they lie",
        )
