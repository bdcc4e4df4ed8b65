"""The index of one shard as a file, `SHARD.tar.index`.

In: a `ShardIndex` and the stamp of its shard. Out: one small binary file (a header, four arrays of
64-bit numbers, the names' letters, a SHA-256 of all that), and back. An index of another version, of
another shard, or with a wrong checksum is `UnfitIndexError`, with the reason: never trusted.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np

from paceline.data.sources.name_table import NameTable
from paceline.data.sources.shard_stamp import ShardStamp
from paceline.data.sources.tar_index import ShardIndex
from paceline.data.written_file import write_file

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
        content = path.read_bytes()
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
