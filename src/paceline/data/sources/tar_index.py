"""The index of a tar shard: where its samples lie. `index_store` keeps indexes on disk.

A shard has the WebDataset layout: `key.jpg` (or .jpeg, .png, .webp) and `key.cls` with the class
index in ASCII; the key ends at the first dot of the file name; other members are passed over. A key
whose image and label have a further dot in common (`key.v2.jpg`, `key.v2.cls`) is a sample, too.
Whatever would lose samples silently is an error instead.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.order import Int64
from paceline.data.sources.storage import (
    TRANSIENT,
    Retry,
    ShardStamp,
)

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
LABEL_EXTENSION = "cls"
_LABEL_BYTES = 32
_BLOCK = tarfile.BLOCKSIZE
# Two blocks of zeros end a tar, which is then filled up to a whole record: so much and no more.
_MOST_AFTER_END = 2 * _BLOCK + tarfile.RECORDSIZE
_REBUILD = "copy or build the shard anew"
_OCTAL = frozenset(b"01234567")

# What tarfile lets escape where a header is damaged; a header can also ask for all the memory.
_DAMAGE = (
    tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, LookupError, TypeError,
    RecursionError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class ShardIndex:
    """The images of one shard, in the order in which they lie there."""

    names: NameTable
    offsets: Int64
    sizes: Int64
    labels: Int64

    def __len__(self) -> int:
        return len(self.labels)


def scan_shard(path: Path, content: BinaryIO) -> ShardIndex:
    """Indexes the uncompressed tar in `content`; `path` is for messages."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    # Fields with a further dot, such as `key.v2.jpg`, by their name without the last extension.
    dotted_images: dict[str, tuple[str, int, int]] = {}
    dotted_labels: dict[str, tarfile.TarInfo] = {}
    for member in tar_members(path, content):
        key, extension = split_name(member.name)
        longer, _, last = member.name.rpartition(".")
        is_label = last.lower() == LABEL_EXTENSION
        # Hidden files, such as the `._name` twins that macOS puts into archives, have no key.
        if not key or not (is_label or last.lower() in IMAGE_EXTENSIONS):
            continue
        has_dot = "." in extension
        there: Mapping[str, object] = (
            (dotted_labels if is_label else dotted_images)
            if has_dot
            else (labels if is_label else images)
        )
        if longer in there:
            raise DataError(f"{path}: sample {longer!r} is there twice ({member.name})", _REBUILD)
        if not is_label:
            place = (member.name, member.offset_data, member.size)
            (dotted_images if has_dot else images)[longer] = place
        elif has_dot:
            dotted_labels[longer] = member
        else:
            labels[key] = _label(path, key, content, member)
    if lonely := images.keys() ^ labels.keys():
        key = min(lonely)
        there_is, missing = ("an image", "label") if key in images else ("a label", "image")
        raise DataError(
            f"{path}: sample {key!r} has {there_is} but no {missing}",
            f"each {'/'.join(IMAGE_EXTENSIONS)} needs a .cls of the same name; {_REBUILD}",
        )
    # A sample with a plain image and label has these as further fields.
    pairs = dotted_images.keys() & dotted_labels.keys()
    for key, longer in _dotted_samples(path, pairs, images.keys()).items():
        images[key] = dotted_images[longer]
        labels[key] = _label(path, longer, content, dotted_labels[longer])
    if not images:
        raise DataError(
            f"{path}: no image in it",
            f"samples are key.jpg (jpeg, png, webp) and key.cls; remove it, or {_REBUILD}",
        )
    found = sorted(((*place, labels[key]) for key, place in images.items()), key=itemgetter(1))
    return ShardIndex(
        names=NameTable(name for name, *_ in found),
        offsets=np.array([offset for _, offset, _, _ in found], dtype=np.int64),
        sizes=np.array([size for _, _, size, _ in found], dtype=np.int64),
        labels=np.array([label for *_, label in found], dtype=np.int64),
    )


def split_name(name: str) -> tuple[str, str]:
    """Key and field of a member, as webdataset has them: the key ends at the first dot of the file
    name. The key is empty for hidden files."""
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return (folder + slash + stem if stem else ""), extension.lower()


def _dotted_samples(path: Path, names: Iterable[str], plain: Container[str]) -> dict[str, str]:
    """The one of `names` with each key that is not among `plain`; DataError if two have one key, which
    webdataset takes for one sample."""
    found: dict[str, str] = {}
    for longer in sorted(names):
        key, _ = split_name(longer)
        if key in plain:
            continue
        if (other := found.setdefault(key, longer)) != longer:
            raise DataError(
                f"{path}: samples {other!r} and {longer!r} have the same key {key!r}",
                "a key ends at the first dot of the file name, as in webdataset: rename one of them",
            )
    return found


# What webdataset shards have beside their images, and tars of one class have not.
_FIELDS = (LABEL_EXTENSION, "json", "txt")


def is_shard(path: Path, retry: Retry) -> bool:
    """Returns True if the plain tar has `.cls` members, or images with another field of the same key."""

    def look() -> bool:
        images: set[str] = set()
        others: set[str] = set()
        with open_regular(path) as content:
            for member in tar_members(path, content):
                key, extension = split_name(member.name)
                if key and extension == LABEL_EXTENSION:
                    return True
                if extension in IMAGE_EXTENSIONS:
                    images.add(key)
                elif extension in _FIELDS:
                    others.add(key)
                if key in images and key in others:
                    return True
        return False

    return retry.read(path, look)


class _Member(tarfile.TarInfo):
    """Reads the header of a regular file with a short name without what nobody asks for (owner, mode,
    time), in a third of tarfile's time; leaves all other headers to tarfile."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        name = bytes(buf[:100]).partition(b"\0")[0]
        size, checksum = (bytes(buf[a:b]).rstrip(b"\0 ") for a, b in ((124, 136), (148, 156)))
        plain = (
            len(buf) == _BLOCK
            and buf[156:157] in (tarfile.REGTYPE, tarfile.AREGTYPE)
            and buf[345] == 0  # no first part of a long name
            and name.isascii()
            and not name.endswith(b"/")
            and size
            and _OCTAL.issuperset(size)
            and checksum
            and _OCTAL.issuperset(checksum)
        )
        # The bytes of the checksum itself count as spaces.
        if plain and int(checksum, 8) == sum(buf) - sum(buf[148:156]) + 8 * 0x20:
            member = cls(name.decode())
            member.size = int(size, 8)
            return member
        return super().frombuf(buf, encoding, errors)


def tar_members(path: Path, content: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The regular files of the archive, which must be whole to its end marker. OSError: storage
    that fails for the moment."""
    end = 0
    try:
        with tarfile.open(fileobj=content, mode="r:", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                # tarfile keeps every member it met: gigabytes for a shard of millions.
                archive.members = []  # type: ignore[attr-defined]
                # Some Pythons go back to where they were for a size below 0, and never end.
                if member.size < 0 or member.offset_data <= end:
                    raise DataError(f"{path}: damaged member header at byte {end}", _REBUILD)
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise DataError(
                        f"{path}: {member.name!r} is a link, device or sparse file",
                        "shards hold plain files only; " + _REBUILD,
                    )
                size = member.size if member.isfile() else 0
                end = member.offset_data + -(-size // _BLOCK) * _BLOCK
                if member.isfile():
                    yield member
            # tarfile takes a cut or a damaged header for the end; only zeros are the end.
            content.seek(end)
            tail = content.read(_MOST_AFTER_END + 1)
    except DataError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            raise  # the shard may be whole; whoever scans it may try again
        raise DataError(f"{path}: not a readable tar shard ({error})", _REBUILD) from None
    if len(tail) < _BLOCK:
        raise DataError(f"{path}: truncated, no end marker at byte {end}", _REBUILD)
    if any(tail[:_BLOCK]):
        raise DataError(f"{path}: damaged member header at byte {end}", _REBUILD)
    # Blocks of zeros in the midst, as a download or a disk leaves them, look like the end.
    if any(tail) or len(tail) > _MOST_AFTER_END:
        raise DataError(
            f"{path}: goes on after its end marker at byte {end}",
            f"{_REBUILD}; records are 10,240 bytes (`tar -b 20`, the default)",
        )


def _label(path: Path, key: str, content: BinaryIO, member: tarfile.TarInfo) -> int:
    content.seek(member.offset_data)
    raw = content.read(min(member.size, _LABEL_BYTES))
    if len(raw) < min(member.size, _LABEL_BYTES):
        raise DataError(f"{path}: truncated within the label of sample {key!r}", _REBUILD)
    text = raw.strip()
    try:
        label = int(text)  # as webdataset decodes it
    except ValueError:
        label = -1
    if not 0 <= label <= np.iinfo(np.int64).max or member.size > _LABEL_BYTES:
        raise DataError(
            f"{path}: the label of sample {key!r} is {text.decode('ascii', 'replace')!r}",
            "a .cls file holds one class index, 0 or more, in digits; classes.json names the classes",
        )
    return label


class NameTable:
    """Very many names in one block of bytes: a million Python strings take over 100 MB in each
    rank.

    Immutable. Names that are not valid Unicode, as a file system may hold them, survive.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends: Int64 = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._letters = b"".join(encoded)

    @classmethod
    def from_parts(cls, ends: Int64, letters: bytes) -> Self:
        """The inverse of `parts`."""
        table = cls(())
        table._ends, table._letters = ends, letters
        return table

    @classmethod
    def joined(cls, tables: Sequence[NameTable]) -> Self:
        """The names of all tables, in order."""
        lengths = np.concatenate([np.diff(table._ends) for table in tables])
        letters = b"".join(table._letters for table in tables)
        return cls.from_parts(np.cumsum([0, *lengths.tolist()], dtype=np.int64), letters)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"ends": self._ends, "letters": np.frombuffer(self._letters, dtype=np.uint8)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The inverse of `to_arrays`."""
        return cls.from_parts(arrays["ends"], arrays["letters"].tobytes())

    @property
    def parts(self) -> tuple[Int64, bytes]:
        """Where each name ends, after a 0, and the letters of all."""
        return self._ends, self._letters

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(i)
        letters = self._letters[self._ends[i] : self._ends[i + 1]]
        return letters.decode("utf-8", "surrogateescape")


class FileWindow(io.BytesIO):
    """A stretch of a file, read as if it were a file of its own; it shares the position of the
    other file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {0: 0, 1: self._at, 2: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def scan_file(path: Path, retry: Retry) -> ShardIndex:
    """`scan_shard` of a plain shard; DataError where it cannot be read."""

    def scan() -> ShardIndex:
        with open_regular(path) as content:
            return scan_shard(path, content)

    return retry.read(path, scan)


def stamp_of(path: Path, retry: Retry) -> ShardStamp:
    """DataError where it cannot be read."""
    return retry.read(path, lambda: ShardStamp.of(path))
