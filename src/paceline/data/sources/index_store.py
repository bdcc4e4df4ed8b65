"""`open_shards`: the tar shards of a split; `IndexStore`: their indexes, built once and kept on disk.

On disk an index is one small binary file: a header, four arrays of 64-bit numbers, the letters of the
names, and a SHA-256 of all that. It is read from `SHARD.tar.index` beside the shard or, if that
place is read-only, from the user's cache. An index of another version, of another state of its
shard, or with a wrong checksum is not used, and the shard is scanned. Of all processes of a host
that start at once, one scans and writes while the others wait. Sets so small that a scan takes no
time are scanned every time, and no index of them is kept.
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

# A sample takes at least four blocks of 512 bytes, a scan 50 µs: below this it takes a second or two.
_KEPT_FROM_BYTES = 64 << 20
_LOCK_FILE = ".paceline-index.lock"


def open_shards(
    paths: Sequence[Path],
    classes: Sequence[str] | None = None,
    retry: Retry | None = None,
    keep_index: bool = True,
) -> TarShards:
    """Finds or makes the index of every shard; one that is damaged or wrongly labelled fails by name.
    Without `keep_index` what was made is not written anywhere."""
    paths, retry = sorted(paths), retry or Retry(0)
    store = IndexStore(retry, keep_index)
    packed = [path for path in paths if path.name.endswith("gz")]
    plain = [path for path in paths if path not in packed]
    taken = store.take(plain)
    files = files_on_disk(zip(plain, (stamp for stamp, _ in taken), strict=True), retry)
    shards = [*zip(files, (index for _, index in taken), strict=True), *shards_in_memory(packed)]
    source = TarShards.of(sorted(shards, key=lambda shard: shard[0].path), classes, retry)
    if store.notes:
        more = f" and {len(store.notes) - 1} more" if store.notes[1:] else ""
        source.add_note(f"{store.notes[0]}{more}")
    return source


class IndexStore:
    """`notes` tell what was built anew and why, and what could not be kept."""

    def __init__(self, retry: Retry, keep: bool = True) -> None:
        """Without `keep` nothing is written: whoever looks at a set leaves no trace in it."""
        self._retry = retry
        self._keeps = keep
        self.notes: list[str] = []
        self._misfits: dict[Path, str] = {}

    def take(self, paths: Sequence[Path]) -> list[tuple[ShardStamp, ShardIndex]]:
        """In the order of `paths`. DataError: a shard that is damaged, wrong, or unreadable."""
        stamps = [stamp_of(path, self._retry) for path in paths]
        found = {p: self._find(p, s) for p, s in zip(paths, stamps, strict=True)}
        missing = [p for p in paths if found[p] is None]
        if missing:
            large = sum(s.size for s in stamps) >= _KEPT_FROM_BYTES or bool(self._misfits)
            known = dict(zip(paths, stamps, strict=True))
            if large and self._keeps:
                self._build_once(missing, known, found)
            else:
                found |= {path: scan_file(path, self._retry) for path in missing}
        indexes = [found[path] for path in paths]
        return [(s, i) for s, i in zip(stamps, indexes, strict=True) if i is not None]

    def _find(self, path: Path, stamp: ShardStamp) -> ShardIndex | None:
        for place in _places(path):
            try:
                index = read_index(place, stamp)
            except UnfitIndexError as error:
                self._misfits[path] = str(error)
                continue
            if index is not None:
                self._misfits.pop(path, None)
                return index
        return None

    def _build_once(
        self,
        missing: list[Path],
        stamps: dict[Path, ShardStamp],
        found: dict[Path, ShardIndex | None],
    ) -> None:
        with file_lock(_lock_path(missing[0].parent)):
            for path in missing:
                # Whoever held the lock before may have built it.
                index = self._find(path, stamps[path])
                if index is None:
                    index = scan_file(path, self._retry)
                    self._keep(path, index, stamps[path])
                found[path] = index
        for path, reason in sorted(self._misfits.items()):
            self.notes.append(f"index of {path.name} {reason}: built anew")

    def _keep(self, path: Path, index: ShardIndex, stamp: ShardStamp) -> None:
        if stamp_of(path, self._retry) != stamp:
            return  # it is being written to; reading it will say so
        for place in _places(path):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_index(place, index, stamp)
            except (DataError, OSError):
                continue
            return
        self.notes.append(f"index of {path.name} cannot be kept: no place to write to")


def _places(path: Path) -> Iterator[Path]:
    """Where the index of a shard may lie, the best place first."""
    yield index_path(path)
    kept = _cached(path)
    if kept is not None:
        yield kept


def _cached(path: Path) -> Path | None:
    """In the user's cache, under a name that the shard's whole path decides; None without one."""
    cache = user_cache()
    if cache is None:
        return None
    whole = str(path.resolve()).encode("utf-8", "surrogateescape")
    return cache / "index" / (hashlib.sha256(whole).hexdigest()[:32] + SUFFIX)


def _lock_path(directory: Path) -> Path:
    """Beside the shards, or in the user's cache where nothing can be written there."""
    beside = directory / _LOCK_FILE
    if os.access(directory, os.W_OK):
        return beside
    place = _cached(beside)
    if place is None:
        return beside
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return beside  # no lock then: each process scans for itself, and all find the same
    return place.with_suffix(".lock")


SUFFIX = ".index"
# The magic number ends with the version; then size, time and probe of the shard, samples, letters.
_MAGIC = b"paceline.index.1"
_HEADER = struct.Struct("<16sqq32sqq")
_NUMBER = np.dtype("<i8")
_DIGEST_BYTES = 32


class UnfitIndexError(Exception):
    """An index that must not be used; `str()` says why."""


def index_path(shard: Path) -> Path:
    return shard.with_name(shard.name + SUFFIX)


def write_index(path: Path, index: ShardIndex, stamp: ShardStamp) -> None:
    """DataError where the disk does not take it."""
    ends, letters = index.names.parts
    header = _HEADER.pack(
        _MAGIC, stamp.size, stamp.mtime_ns, stamp.probe, len(index), len(letters)
    )  # fmt: skip
    arrays = (index.offsets, index.sizes, index.labels, ends)
    body = b"".join([header, *(a.astype(_NUMBER).tobytes() for a in arrays), letters])
    write_file(path, body + hashlib.sha256(body).digest())


def read_index(path: Path, stamp: ShardStamp) -> ShardIndex | None:
    """The index at `path`, None where there is none."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnfitIndexError(f"cannot be read ({error.strerror})") from None
    if len(content) < _HEADER.size + _DIGEST_BYTES:
        raise UnfitIndexError("is cut off")
    magic, size, mtime_ns, probe, samples, letters = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise UnfitIndexError("is of another version")
    if ShardStamp(size, mtime_ns, probe) != stamp:
        raise UnfitIndexError("belongs to an older state of the shard")
    end = len(content) - _DIGEST_BYTES
    if hashlib.sha256(content[:end]).digest() != content[end:]:
        raise UnfitIndexError("is damaged")
    # Whoever made the index made the checksum: nothing that does not fit the shard is believed.
    if samples < 0 or letters < 0 or end != _HEADER.size + 8 * (4 * samples + 1) + letters:
        raise UnfitIndexError("is of another length than it says")
    numbers = np.frombuffer(content, _NUMBER, count=4 * samples + 1, offset=_HEADER.size)
    offsets, sizes, labels = (
        numbers[k * samples : (k + 1) * samples].astype(np.int64) for k in range(3)
    )
    ends = numbers[3 * samples :].astype(np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > stamp.size - offsets).any():
        raise UnfitIndexError("names bytes outside of the shard")
    if (labels < 0).any() or ends[0] != 0 or ends[-1] != letters or (np.diff(ends) < 0).any():
        raise UnfitIndexError("has labels or names that cannot be")
    return ShardIndex(
        NameTable.from_parts(ends, content[end - letters : end]), offsets, sizes, labels
    )
