"""The index of a tar shard: names, positions and labels of the samples. `index_store` writes indexes.

A shard has the WebDataset layout: `key.jpg` (or .jpeg, .png, .webp) and `key.cls` with the class
index in ASCII. The key ends at the first dot of the file name. Other members are ignored. A shard
in which an image has no label, or a label no image, is an error.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.order import Int64
from paceline.data.sources.storage import TRANSIENT, Retry, ShardStamp

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
LABEL_EXTENSION = "cls"
_LABEL_BYTES = 32
_BLOCK = tarfile.BLOCKSIZE
# Two blocks of zeros end a tar, and more zeros fill the last record.
_MOST_AFTER_END = 2 * _BLOCK + tarfile.RECORDSIZE
_REBUILD = "copy or build the shard again"
_OCTAL = frozenset(b"01234567")

# Exceptions that tarfile raises for damaged headers. A header may also request too much memory.
_DAMAGE = (
    tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, LookupError, TypeError,
    RecursionError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class ShardIndex:
    """Names, positions and labels of the images of a shard, in the order of the shard."""

    names: NameTable
    offsets: Int64
    sizes: Int64
    labels: Int64

    def __len__(self) -> int:
        return len(self.labels)


def scan_shard(path: Path, content: BinaryIO) -> ShardIndex:
    """Indexes the uncompressed tar in `content`.

    Args:
        path: The shard, for messages.
        content: The bytes of the tar.

    Raises:
        DataError: If the shard is damaged, an image has no label, or a label has no image.
    """
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    # Names with more than one dot, such as `key.v2.jpg`, without the last extension.
    dotted: dict[str, set[str]] = {"images": set(), "labels": set()}
    for member in tar_members(path, content):
        key, field = split_name(member.name)
        extension = field.rpartition(".")[2]
        is_label = extension == LABEL_EXTENSION
        # Hidden files, such as the `._name` files of macOS, have no key.
        if not key or not (is_label or extension in IMAGE_EXTENSIONS):
            continue
        if field != extension:
            dotted["labels" if is_label else "images"].add(member.name.rpartition(".")[0])
            continue
        if key in (labels if is_label else images):
            raise DataError(f"{path}: sample {key!r} occurs twice ({member.name})", _REBUILD)
        if is_label:
            labels[key] = _label(path, key, content, member)
        else:
            images[key] = (member.name, member.offset_data, member.size)
    if unpaired := images.keys() ^ labels.keys():
        key = min(unpaired)
        present, missing = ("an image", "label") if key in images else ("a label", "image")
        raise DataError(
            f"{path}: sample {key!r} has {present} but no {missing}",
            f"each {'/'.join(IMAGE_EXTENSIONS)} needs a .cls of the same name; {_REBUILD}",
        )
    for name in sorted(dotted["images"] & dotted["labels"]):
        if split_name(name)[0] not in images:
            raise DataError(
                f"{path}: the key of sample {name!r} has a dot",
                "rename it: as in webdataset, a key ends at the first dot of the file name",
            )
    if not images:
        raise DataError(
            f"{path}: no image in it",
            f"samples are key.jpg (jpeg, png, webp) and key.cls; remove it, or {_REBUILD}",
        )
    samples = sorted(((*place, labels[key]) for key, place in images.items()), key=itemgetter(1))
    return ShardIndex(
        names=NameTable(name for name, *_ in samples),
        offsets=np.array([offset for _, offset, _, _ in samples], dtype=np.int64),
        sizes=np.array([size for _, _, size, _ in samples], dtype=np.int64),
        labels=np.array([label for *_, label in samples], dtype=np.int64),
    )


def split_name(name: str) -> tuple[str, str]:
    """Divides the name of a file in a tar into key and extension, as webdataset does.

    The key of a hidden file is empty.
    """
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return (folder + slash + stem if stem else ""), extension.lower()


class _Member(tarfile.TarInfo):
    """A tar entry that parses headers of regular files three times as fast as tarfile.

    All other headers are left to tarfile.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        name = bytes(buf[:100]).partition(b"\0")[0]
        size, checksum = (bytes(buf[a:b]).rstrip(b"\0 ") for a, b in ((124, 136), (148, 156)))
        plain = (
            len(buf) == _BLOCK
            and buf[156:157] in (tarfile.REGTYPE, tarfile.AREGTYPE)
            and buf[345] == 0  # no prefix of a long name
            and name.isascii()
            and not name.endswith(b"/")
            and size
            and _OCTAL.issuperset(size)
            and checksum
            and _OCTAL.issuperset(checksum)
        )
        # In the sum, the bytes of the checksum field are replaced by spaces.
        if plain and int(checksum, 8) == sum(buf) - sum(buf[148:156]) + 8 * 0x20:
            member = cls(name.decode())
            member.size = int(size, 8)
            return member
        return super().frombuf(buf, encoding, errors)


def tar_members(path: Path, content: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the regular files of a tar, and checks that it is complete.

    Args:
        path: The tar, for messages.
        content: The bytes of the tar.

    Raises:
        DataError: If the tar is damaged or truncated, or has links or devices.
        OSError: If storage fails temporarily.
    """
    end = 0
    try:
        with tarfile.open(fileobj=content, mode="r:", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                # tarfile keeps every member, which takes gigabytes for millions of them.
                archive.members = []  # type: ignore[attr-defined]
                # After a negative size, some Python versions go back and loop forever.
                if member.size < 0 or member.offset_data <= end:
                    raise DataError(f"{path}: damaged member header at byte {end}", _REBUILD)
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise DataError(
                        f"{path}: {member.name!r} is a link, device or sparse file",
                        "shards may contain only regular files; " + _REBUILD,
                    )
                size = member.size if member.isfile() else 0
                end = member.offset_data + -(-size // _BLOCK) * _BLOCK
                if member.isfile():
                    yield member
            # tarfile takes a truncated or damaged header for the end, but only zeros end a tar.
            content.seek(end)
            tail = content.read(_MOST_AFTER_END + 1)
    except DataError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            raise  # the shard may be complete, so the caller may try again
        raise DataError(f"{path}: not a readable tar shard ({error})", _REBUILD) from None
    if len(tail) < _BLOCK:
        raise DataError(f"{path}: truncated: no end marker at byte {end}", _REBUILD)
    if any(tail[:_BLOCK]):
        raise DataError(f"{path}: damaged member header at byte {end}", _REBUILD)
    # Zeros in the middle, for example of an incomplete download, look like the end.
    if any(tail) or len(tail) > _MOST_AFTER_END:
        raise DataError(
            f"{path}: has data after the end marker at byte {end}",
            f"{_REBUILD} with tar's default record size (`tar -b 20`)",
        )


def _label(path: Path, key: str, content: BinaryIO, member: tarfile.TarInfo) -> int:
    content.seek(member.offset_data)
    raw = content.read(min(member.size, _LABEL_BYTES))
    if len(raw) < min(member.size, _LABEL_BYTES):
        raise DataError(f"{path}: truncated within the label of sample {key!r}", _REBUILD)
    text = raw.strip()
    try:
        label = int(text)  # as in webdataset
    except ValueError:
        label = -1
    if not 0 <= label <= np.iinfo(np.int64).max or member.size > _LABEL_BYTES:
        raise DataError(
            f"{path}: the label of sample {key!r} is {text.decode('ascii', 'replace')!r}",
            "a .cls file holds one class index, 0 or more, in digits; classes.json names the classes",
        )
    return label


class NameTable:
    """An immutable sequence of names, stored in one block of bytes.

    A million Python strings would take over 100 MB in each rank. Names need not be valid Unicode.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends: Int64 = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._letters = b"".join(encoded)

    @classmethod
    def from_parts(cls, ends: Int64, letters: bytes) -> Self:
        """Creates a table from the two values that `parts` returns."""
        table = cls(())
        table._ends, table._letters = ends, letters
        return table

    @classmethod
    def joined(cls, tables: Sequence[NameTable]) -> Self:
        """Concatenates the names of several tables."""
        lengths = np.concatenate([np.diff(table._ends) for table in tables])
        letters = b"".join(table._letters for table in tables)
        return cls.from_parts(np.cumsum([0, *lengths.tolist()], dtype=np.int64), letters)

    @property
    def parts(self) -> tuple[Int64, bytes]:
        """An array with 0 and the end of each name in the block, and the block of bytes."""
        return self._ends, self._letters

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(i)
        letters = self._letters[self._ends[i] : self._ends[i + 1]]
        return letters.decode("utf-8", "surrogateescape")


def scan_file(path: Path, retry: Retry) -> ShardIndex:
    """Indexes an uncompressed shard. Raises DataError if the shard cannot be read."""

    def scan() -> ShardIndex:
        with open_regular(path) as content:
            return scan_shard(path, content)

    return retry.read(path, scan)


def stamp_of(path: Path, retry: Retry) -> ShardStamp:
    """Returns size and time of a shard (`ShardStamp`). Raises DataError if it cannot be read."""
    return retry.read(path, lambda: ShardStamp.of(path))
