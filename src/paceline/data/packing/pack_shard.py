"""`ShardWriter`: one tar shard, written in the WebDataset layout.

In: samples, one after another. Out: a tar whose bytes depend on the samples alone (no times, owners or
names of the machine), its SHA-256, and its index. It is read back and compared before it gets its name.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paceline.core.errors import DataError
from paceline.data.sources.name_table import NameTable
from paceline.data.sources.shard_index_file import index_path, write_index
from paceline.data.sources.shard_stamp import ShardStamp
from paceline.data.sources.tar_index import ShardIndex

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_CHUNK_BYTES = 4 << 20


class ShardWriter:
    """Writes into a file that somebody else opened and will give its name."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._names: list[str] = []
        self._places: list[tuple[int, int, int]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def add(self, key: str, extension: str, content: bytes, label: int) -> None:
        """Image, then label; `key` is ours, never a name from the source."""
        self._names.append(f"{key}.{extension}")
        self._places.append((self.bytes + _BLOCK, len(content), label))
        self._member(f"{key}.{extension}", content)
        self._member(f"{key}.cls", str(label).encode())

    def _member(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        self._write(content)
        self._write(bytes(-len(content) % _BLOCK))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.bytes += len(content)

    def finish(self, path: Path) -> str:
        """The SHA-256 of all, after reading it back; `path` is for messages."""
        self._write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        # Else the page cache would answer, and not the disk.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = file_digest(self._file)
        if found != self._digest.hexdigest():
            raise DataError(f"{path}: reads back other than it was written", "check the disk")
        return found

    def write_index(self, path: Path) -> None:
        """The index beside the finished shard at `path`."""
        offsets, sizes, labels = np.array(self._places, dtype=np.int64).reshape(-1, 3).T
        index = ShardIndex(NameTable(self._names), offsets, sizes, labels)
        write_index(index_path(path), index, ShardStamp.of(path))


def file_digest(file: BinaryIO) -> str:
    """SHA-256 of the whole file, whatever its size."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
