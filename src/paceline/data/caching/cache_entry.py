"""One sample as a file of the disk cache.

In: encoded bytes, or pixels. Out: a header (kind and shape, length, checksum) and the bytes, and back.
Whatever is not exactly what was written, by a crash or by a failing disk, is None.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

from paceline.data.caching.cache_store import Data

_MAGIC = b"plc1"
# Magic number, checksum, index, length, then height, width and channels; encoded bytes have none.
_HEADER = struct.Struct("<4sIqqIII")


def to_entry(i: int, data: Data) -> bytes:
    shape = data.shape if isinstance(data, np.ndarray) else (0, 0, 0)
    content = data.tobytes() if isinstance(data, np.ndarray) else data
    fields = (i, len(content), *shape)
    return _HEADER.pack(_MAGIC, _checksum(fields, content), *fields) + content


def from_entry(i: int, entry: bytes) -> Data | None:
    if len(entry) < _HEADER.size:
        return None
    magic, checksum, *fields = _HEADER.unpack_from(entry)
    content = entry[_HEADER.size :]
    index, length, *shape = fields
    if magic != _MAGIC or index != i or length != len(content):
        return None
    if checksum != _checksum(tuple(fields), content):
        return None
    if not any(shape):
        return content
    if math.prod(shape) != len(content):
        return None
    return np.frombuffer(content, np.uint8).reshape(shape)


def _checksum(fields: tuple[int, ...], content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(repr(fields).encode()))
