"""`open_shards` opens the tar shards of a split; `IndexStore` builds the indexes of shards on disk.

An index is a small binary file: a header, four arrays of 64-bit integers, the sample names, and the
SHA-256 of the preceding bytes. The file is `SHARD.tar.index` next to the shard, or in the user's
cache if the folder of the shard is read-only.
If an index has another format version or a wrong checksum, or the shard has changed since, the
index is not used and the shard is scanned. If several processes of a host start together, one of
them scans and writes while the others wait. Small sets are scanned at every start, and their
indexes are not written.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import read_regular, user_cache
from paceline.data.sources.shards import TarShards, files_on_disk, shards_in_memory
from paceline.data.sources.storage import (
    Retry,
    ShardStamp,
    file_lock,
    write_file,
)
from paceline.data.sources.tar_index import NameTable, ShardIndex, scan_file, stamp_of

# Sets below this size get no index files. A sample has at least four blocks of 512 bytes and takes 50 µs
# to scan, so such sets take at most 2 s.
_KEPT_FROM_BYTES = 64 << 20
_LOCK_FILE = ".paceline-index.lock"


def open_shards(
    paths: Sequence[Path],
    classes: Sequence[str] | None = None,
    retry: Retry | None = None,
    keep_index: bool = True,
) -> TarShards:
    """Opens tar shards as a `Source`. Builds or reads the index of each shard.

    Args:
        paths: The shards of one split.
        classes: Names of the classes. None uses class indices as names.
        retry: Repeats reads after temporary errors.
        keep_index: Writes new indexes to disk.

    Raises:
        DataError: If a shard is damaged or unreadable, or if a label is invalid.
    """
    paths, retry = sorted(paths), retry or Retry(0)
    store = IndexStore(retry, keep_index)
    compressed = [path for path in paths if path.name.endswith("gz")]
    plain = [path for path in paths if path not in compressed]
    indexed = store.take(plain)
    files = files_on_disk(zip(plain, (stamp for stamp, _ in indexed), strict=True), retry)
    shards = [
        *zip(files, (index for _, index in indexed), strict=True), *shards_in_memory(compressed)
    ]  # fmt: skip
    source = TarShards(sorted(shards, key=lambda shard: shard[0].path), classes, retry)
    if store.notes:
        more = f" and {len(store.notes) - 1} more" if store.notes[1:] else ""
        source.add_note(f"{store.notes[0]}{more}")
    return source


class IndexStore:
    """Reads, builds and writes the indexes of shards: names, positions and labels of their images.

    Attributes:
        notes: Messages that name rebuilt indexes with the reason, and indexes that were not
            writable.
    """

    def __init__(self, retry: Retry, keep: bool = True) -> None:
        """Creates a store that writes new indexes to disk if `keep` is True."""
        self._retry = retry
        self._keeps = keep
        self.notes: list[str] = []
        self._unusable: dict[Path, str] = {}

    def take(self, paths: Sequence[Path]) -> list[tuple[ShardStamp, ShardIndex]]:
        """Returns size and time (`ShardStamp`) and index of each shard, in the order of `paths`.

        Raises:
            DataError: If a shard is damaged, invalid or unreadable.
        """
        stamps = {path: stamp_of(path, self._retry) for path in paths}
        indexes = {
            path: index for path in paths if (index := self._find(path, stamps[path])) is not None
        }
        missing = [path for path in paths if path not in indexes]
        large = sum(stamp.size for stamp in stamps.values()) >= _KEPT_FROM_BYTES
        if missing and self._keeps and (large or self._unusable):
            with file_lock(_lock_path(missing[0].parent)):
                for path in missing:
                    # Another process may have built the index while this process waited for the lock.
                    indexes[path] = self._find(path, stamps[path]) or self._build(
                        path, stamps[path]
                    )
            self.notes += [
                f"index of {path.name} {reason}: rebuilt"
                for path, reason in sorted(self._unusable.items())
            ]
        else:
            indexes |= {path: scan_file(path, self._retry) for path in missing}
        return [(stamps[path], indexes[path]) for path in paths]

    def _find(self, path: Path, stamp: ShardStamp) -> ShardIndex | None:
        for place in _places(path):
            try:
                index = read_index(place, stamp)
            except UnfitIndexError as error:
                self._unusable[path] = str(error)
                continue
            if index is not None:
                self._unusable.pop(path, None)
                return index
        return None

    def _build(self, path: Path, stamp: ShardStamp) -> ShardIndex:
        index = scan_file(path, self._retry)
        if stamp_of(path, self._retry) != stamp:
            return index  # another program writes the shard, which reading will report
        for place in _places(path):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_index(place, index, stamp)
            except (DataError, OSError):
                continue
            return index
        self.notes.append(f"index of {path.name} is not kept: no directory is writable")
        return index


def _places(path: Path) -> Iterator[Path]:
    """Yields the possible paths of a shard's index, the preferred path first."""
    yield index_path(path)
    cached = _in_cache(path)
    if cached is not None:
        yield cached


def _in_cache(path: Path) -> Path | None:
    """Returns the path of the index in the user's cache, or None if there is no cache."""
    cache = user_cache()
    if cache is None:
        return None
    whole = str(path.resolve()).encode("utf-8", "surrogateescape")
    return cache / "index" / (hashlib.sha256(whole).hexdigest()[:32] + SUFFIX)


def _lock_path(directory: Path) -> Path:
    """Returns the path of the lock file for building indexes.

    The file is in the directory of the shards, or in the user's cache if that directory is
    read-only. If neither is writable, there is no lock, and every process scans.
    """
    path = directory / _LOCK_FILE
    cached = None if os.access(directory, os.W_OK) else _in_cache(path)
    if cached is None:
        return path
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return path
    return cached.with_suffix(".lock")


SUFFIX = ".index"
# The header: magic number that ends with the format version; size, modification time and probe of the
# shard; number of samples; length of the names in bytes.
_MAGIC = b"paceline.index.1"
_HEADER = struct.Struct("<16sqq32sqq")
_NUMBER = np.dtype("<i8")
_DIGEST_BYTES = 32


class UnfitIndexError(Exception):
    """Raised for an index that must not be used. The message gives the reason."""


def index_path(shard: Path) -> Path:
    return shard.with_name(shard.name + SUFFIX)


def write_index(path: Path, index: ShardIndex, stamp: ShardStamp) -> None:
    """Writes an index to `path`, with the shard's size and time. Raises DataError if that fails."""
    ends, letters = index.names.parts
    header = _HEADER.pack(
        _MAGIC, stamp.size, stamp.mtime_ns, stamp.probe, len(index), len(letters)
    )  # fmt: skip
    arrays = (index.offsets, index.sizes, index.labels, ends)
    body = b"".join([header, *(a.astype(_NUMBER).tobytes() for a in arrays), letters])
    write_file(path, body + hashlib.sha256(body).digest())


def read_index(path: Path, stamp: ShardStamp) -> ShardIndex | None:
    """Reads an index from `path`, and checks that it belongs to the shard. Returns None without a file.

    Raises:
        UnfitIndexError: If the index must not be used.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnfitIndexError(f"cannot be read ({error.strerror})") from None
    if len(content) < _HEADER.size + _DIGEST_BYTES:
        raise UnfitIndexError("is truncated")
    magic, size, mtime_ns, probe, samples, letters = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise UnfitIndexError("has another version")
    if ShardStamp(size, mtime_ns, probe) != stamp:
        raise UnfitIndexError("belongs to an older state of the shard")
    end = len(content) - _DIGEST_BYTES
    if hashlib.sha256(content[:end]).digest() != content[end:]:
        raise UnfitIndexError("is damaged")
    # The author of a hostile index can also compute its checksum, so all numbers are checked.
    if samples < 0 or letters < 0 or end != _HEADER.size + 8 * (4 * samples + 1) + letters:
        raise UnfitIndexError("has a wrong length")
    numbers = np.frombuffer(content, _NUMBER, count=4 * samples + 1, offset=_HEADER.size)
    offsets, sizes, labels = (
        numbers[k * samples : (k + 1) * samples].astype(np.int64) for k in range(3)
    )
    ends = numbers[3 * samples :].astype(np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > stamp.size - offsets).any():
        raise UnfitIndexError("has positions outside of the shard")
    if (labels < 0).any() or ends[0] != 0 or ends[-1] != letters or (np.diff(ends) < 0).any():
        raise UnfitIndexError("has invalid labels or names")
    return ShardIndex(
        NameTable.from_parts(ends, content[end - letters : end]), offsets, sizes, labels
    )
