"""One tar shard in the WebDataset layout (`ShardWriter`), and what becomes of one image when it is
packed."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.image import CorruptImage, decode, image_facts
from paceline.data.pack.manifest import PackOptions
from paceline.data.sources.index_store import index_path, write_index
from paceline.data.sources.storage import ShardStamp
from paceline.data.sources.tar_index import NameTable, ShardIndex

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_CHUNK_BYTES = 4 << 20
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class ShardWriter:
    """Writes one shard into a file that the caller opened and will give its name.

    The bytes depend on the samples alone: no times, owners or names of the machine.
    """

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


@dataclass(frozen=True)
class PackedImage:
    extension: str
    content: bytes
    copied: bool


def pack_image(data: bytes | npt.NDArray[np.uint8], options: PackOptions) -> PackedImage:
    """Images that are small enough and in a wanted format are copied byte for byte; all others are
    turned upright, scaled, and encoded anew as grey or RGB. CorruptImage where it cannot be decoded
    whole, copied or not.

    Equal input and options give equal bytes, with one version of Pillow and its libraries.
    """
    facts = image_facts(data)
    image = decode(data, facts.channels)
    # Pillow's name for the JPEGs of cameras that hold a second picture behind the first.
    found = "JPEG" if facts.format == "MPO" else facts.format
    wanted = found if options.format == "keep" else options.format.upper()
    size = fitted(image.size, options.short_side)
    if isinstance(data, bytes) and size == image.size and wanted == found in _EXTENSIONS:
        return PackedImage(_EXTENSIONS[found], data, copied=True)
    if size != image.size:
        image = image.resize(size, _FILTERS[options.filter])
    # What has no format of ours, such as pixels or a GIF under a wrong name, must lose nothing.
    kind = wanted if wanted in _EXTENSIONS else "PNG"
    return PackedImage(_EXTENSIONS[kind], _encoded(image, kind, options.quality), copied=False)


def fitted(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height with the short side brought down to `short_side`; never enlarged."""
    shorter = min(size)
    if not short_side or shorter <= short_side:
        return size
    width, height = (max(1, round(side * short_side / shorter)) for side in size)
    return width, height


def _encoded(image: Image.Image, kind: str, quality: int) -> bytes:
    stream = io.BytesIO()
    try:
        if kind == "PNG":
            image.save(stream, kind)
        else:
            image.save(stream, kind, quality=quality)
    except (OSError, ValueError) as error:
        # A side that the format cannot hold, such as 20,000 pixels in WebP.
        raise CorruptImage(f"cannot be written as {kind} ({error})") from error
    return stream.getvalue()
