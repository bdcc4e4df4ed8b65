"""`TarShards`: images in tar files with the WebDataset layout.

Any number of threads reads an uncompressed tar by position. A compressed shard is unpacked into
memory, which suits small sets such as the images in the package (`data.source = embedded`).
`index_store.open_shards` opens both kinds.
"""

from __future__ import annotations

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
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Extent, Source, Split
from paceline.data.sources.classes import CLASSES_FILE, numbered_classes, read_classes
from paceline.data.sources.registry import SourceKind
from paceline.data.sources.storage import Retry, ShardFile, ShardStamp, unreadable
from paceline.data.sources.tar_index import NameTable, ShardIndex, scan_shard

# Maximum number of shards kept open, because a process may usually have 1024 open files. Any other
# shard is opened for each read.
DESCRIPTORS_KEPT = 256
EMBEDDED = Path(__file__).parent.parent / "embedded"
_COMPRESSED_LIMIT_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20


class UnpackedShard:
    """The decompressed content of a shard in memory. Raises DataError if it exceeds `limit_bytes`."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        try:
            # In pieces, because a small file can unpack to any size.
            pieces, size = [], 0
            with open_regular(path) as raw, gzip.open(raw) as file:
                while size <= limit_bytes and (piece := file.read(_PIECE_BYTES)):
                    pieces.append(piece)
                    size += len(piece)
            self.data = b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: not a readable gzip file ({error})", "copy or build the shard again"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from None
        if len(self.data) > limit_bytes:
            raise DataError(
                f"{path}: unpacks to more than {limit_bytes / 2**30:.1f} GiB, the memory left for "
                "compressed shards in each rank",
                "decompress them with gunzip; plain .tar shards need no memory",
            )

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        self.data = b""


@dataclass(frozen=True)
class TarFile:
    """An open tar. `stamp`, its size and time, is None if the content is in memory."""

    path: Path
    content: ShardFile | UnpackedShard
    stamp: ShardStamp | None = None


def files_on_disk(stamps: Iterable[tuple[Path, ShardStamp]], retry: Retry) -> list[TarFile]:
    """Opens uncompressed tars. Only the first `DESCRIPTORS_KEPT` tars keep a file descriptor."""
    return [
        TarFile(path, ShardFile(path, stamp, retry, number < DESCRIPTORS_KEPT), stamp)
        for number, (path, stamp) in enumerate(stamps)
    ]


def shards_in_memory(paths: Sequence[Path]) -> Iterator[tuple[TarFile, ShardIndex]]:
    """Unpacks and indexes compressed shards. Raises DataError if they need too much memory."""
    left = _COMPRESSED_LIMIT_BYTES
    for path in paths:
        unpacked = UnpackedShard(path, left)
        left -= len(unpacked.data)
        yield TarFile(path, unpacked), scan_shard(path, io.BytesIO(unpacked.data))


class TarShards(Source):
    """Images in tar shards. Samples are ordered by shard, then by position in the shard."""

    retry: Retry

    def __init__(
        self,
        shards: Iterable[tuple[TarFile, ShardIndex]],
        classes: Sequence[str] | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Creates a source of opened shards.

        Args:
            shards: Pairs of an open shard and the index of the shard.
            classes: Names of the classes. None uses class indices as names.
            retry: Repeats reads after temporary errors.

        Raises:
            DataError: If there is no image, or if a label has no class.
        """
        opened = list(shards)
        self._files = [file for file, _ in opened]
        indexes = [index for _, index in opened]
        counts = [len(index) for index in indexes]
        if not sum(counts):
            first = self._files[0].path if opened else "no shard"
            raise DataError(
                f"{first}: no image in any of {len(opened)} shards",
                "samples are key.jpg (jpeg, png, webp) and key.cls, without other dots",
            )
        offsets, sizes, self.labels = (
            np.concatenate([getattr(index, name) for index in indexes])
            for name in ("offsets", "sizes", "labels")
        )
        # For each sample, the number of the shard, and the offset and size in the shard.
        self._places = np.stack([np.repeat(np.arange(len(opened)), counts), offsets, sizes], axis=1)
        self._names = NameTable.joined([index.names for index in indexes])
        highest = int(self.labels.max())
        self.classes = numbered_classes(highest + 1) if classes is None else classes
        self.retry = retry or Retry(0)
        self.has_extents = any(file.stamp is not None for file in self._files)
        self.shard_sizes = counts
        self._notes: list[str] = []
        if highest >= len(self.classes):
            i = int(np.argmax(self.labels >= len(self.classes)))
            raise DataError(
                f"{self.name(i)}: label {self.labels[i]} is outside the {len(self.classes)} classes",
                f"fix the .cls file, or name the class in {CLASSES_FILE}",
            )

    def _place(self, i: int) -> tuple[TarFile, int, int]:
        if not 0 <= i < len(self.labels):
            raise IndexError(f"sample {i} is out of range: there are {len(self.labels)} samples")
        file, offset, size = self._places[i].tolist()
        return self._files[file], offset, size

    def read(self, i: int) -> bytes:
        """Returns the bytes of image file `i`. Raises DataError if the tar cannot be read."""
        file, offset, size = self._place(i)
        return file.content.read(offset, size)

    def name(self, i: int) -> str:
        return f"{self._place(i)[0].path.name}:{self._names[i]}"

    def close(self) -> None:
        for file in self._files:
            file.content.close()

    @property
    def note(self) -> str:
        """Notes for the user, for example about rebuilt indexes."""
        return "; ".join(self._notes)

    def add_note(self, text: str) -> None:
        self._notes.insert(0, text)

    def identity(self) -> bytes:
        digest = hashlib.sha256()
        for file in self._files:
            if (stamp := file.stamp) is not None:
                digest.update(f"{file.path.name}\0{stamp.size}\0{stamp.mtime_ns}\0".encode())
                digest.update(stamp.probe)
            elif isinstance(file.content, UnpackedShard):
                digest.update(hashlib.sha256(file.content.data).digest())
        return digest.digest()

    def extent(self, i: int) -> Extent | None:
        """Returns file, offset and size of an image, or None if the shard is compressed."""
        file, offset, size = self._place(i)
        return (file.content, offset, size) if isinstance(file.content, ShardFile) else None


def open_embedded(
    settings: DataSettings, split: Split, classes: Sequence[str] | None, keep_index: bool
) -> Source:
    paths = sorted(EMBEDDED.glob(f"{split}-*.tar.gz"))
    return TarShards(shards_in_memory(paths), read_classes(EMBEDDED))


EMBEDDED_KIND = SourceKind(open_embedded)
