"""The index of a tar shard, where its samples lie, and `IndexStore`: the indexes of a split's shards,
built once and kept on disk.

A shard has the WebDataset layout: `key.jpg` (or .jpeg, .png, .webp) and `key.cls` with the class
index in ASCII; the key ends at the first dot of the file name; other members are passed over. A key
whose image and label have a further dot in common (`key.v2.jpg`, `key.v2.cls`) is a sample, too.
Whatever would lose samples silently is an error instead.

On disk an index is one small binary file: a header, four arrays of 64-bit numbers, the letters of the
names, and a SHA-256 of all that. It is read from `SHARD.tar.index` beside the shard or, where that
place is read-only, from the user's cache. An index of another version, of another state of its
shard, or with a wrong checksum is not used, and the shard is scanned. Of all processes of a host
that start at once, one scans and writes while the others wait. Sets so small that a scan takes no
time are scanned every time, and leave nothing behind.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.files import open_regular, read_regular, user_cache
from paceline.data.order import Int64
from paceline.data.sources.storage import (
    TRANSIENT,
    Retry,
    ShardStamp,
    file_lock,
    write_file,
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


# A sample takes at least four blocks of 512 bytes, a scan 50 µs: below this it takes a second or two.
_KEPT_FROM_BYTES = 64 << 20
_LOCK_FILE = ".paceline-index.lock"


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
