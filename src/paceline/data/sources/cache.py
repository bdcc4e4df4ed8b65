"""`CachedSource`: a source whose samples are kept for later epochs, in memory or on a local disk.

Kept raw, a sample is the bytes of its file; kept decoded, its pixels, upright and in the channels
of the run, so that whatever follows sees what it would have seen without a cache.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.files import open_part, part_path, read_regular
from paceline.data.image import CorruptImage, decode
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split, Stored, WrappedSource, source_identity
from paceline.data.sources.storage import unwritable

_MIB = 2**20
_USED_FILE = "used"
_USERS_FILE = "users"
_FOLDERS = 1024
_MAGIC = b"plc1"
# Magic number, checksum, index, length, then height, width and channels; encoded bytes have none.
_HEADER = struct.Struct("<4sIqqIII")


def cached(source: Source, settings: DataSettings, split: Split) -> Source:
    """`source` behind the cache that the settings ask for; each split has its own. DataError: a
    directory that cannot be written to; ConfigError: a cache that could be of no use."""
    if source.is_in_memory:
        raise ConfigError(
            "data.cache",
            settings.cache,
            "these images are in memory already, or made up on the spot",
            "set data.cache = 'none'",
        )
    if not source.is_constant:
        raise ConfigError(
            "data.cache", settings.cache, f"{source.kind} gives other images at every read",
            "set data.cache = 'none', or move random transforms to `augment`",
        )  # fmt: skip
    decoded = settings.cache_form == "decoded"
    limit = settings.cache_mib * _MIB
    store: CacheStore
    if settings.cache == "memory":
        store = MemoryStore(limit)
    else:
        form = f"decoded{settings.channels}" if decoded else "raw"
        directory = Path(settings.cache_dir).expanduser()
        store = DiskStore(directory, f"{source_identity(source)}-{split}-{form}", limit)
    return CachedSource(source, store, settings.channels if decoded else None, settings.cache_mib)


class CachedSource(WrappedSource):
    """A source with the same samples, labels and names as `source`, kept for later epochs.

    `channels` None keeps samples as they are stored, else decoded to so many channels.
    """

    def __init__(
        self, source: Source, store: CacheStore, channels: int | None, limit_mib: int
    ) -> None:
        super().__init__(source)
        self.has_extents, self.pixels, self.retry = False, None, None
        self._store = store
        self._channels = channels
        self._limit_mib = limit_mib
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def read(self, i: int) -> Stored:
        """From the store, or else from the source, which may fail with DataError."""
        data = self._store.get(i)
        with self._lock:
            self._hits += data is not None
            self._misses += data is None
        if data is not None:
            return data
        data = self.whole.read(i)
        if self._channels is not None and self._store.full:
            return data  # who crops it need not decode all of it
        data = self._form(data)
        self._store.put(i, data)
        return data

    def extent(self, i: int) -> None:
        """Reading goes through the cache."""

    @property
    def uncached(self) -> Source:
        return self.whole

    def _form(self, data: Stored) -> Stored:
        if self._channels is None:
            return data
        try:
            image = decode(data, self._channels)
        except CorruptImage:
            return data  # whoever decodes it again finds the same, and has a log for it
        pixels = np.asarray(image)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    def counters(self) -> dict[str, int]:
        found = super().counters()
        found |= {"cache_hits": self._hits, "cache_misses": self._misses}
        damaged = self._store.damaged
        return found | ({"cache_damaged": damaged} if damaged else {})

    @property
    def note(self) -> str:
        form = "raw" if self._channels is None else "decoded"
        read = self._hits + self._misses
        share = f", {self._hits} of {read} reads from it" if read else ""
        text = f"{form} cache {self._store.describe()}, at most {self._limit_mib} MiB{share}"
        return "; ".join(filter(None, (text, self.whole.note)))

    def close(self) -> None:
        super().close()
        self._store.close()


class CacheStore(ABC):
    """Where samples stay between epochs. Used by many threads at once. Never fails: what cannot be
    kept is not kept.

    Nothing is ever evicted: every sample is wanted once an epoch, so what came first is as good as
    what comes later, and a cache that evicts would miss all the time. `full`: a sample was too many
    already; a smaller one may still fit. `damaged`: samples that were not as they had been written.
    """

    full: bool
    damaged: int

    @abstractmethod
    def get(self, i: int) -> Stored | None: ...

    @abstractmethod
    def put(self, i: int, data: Stored) -> None: ...

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...


class MemoryStore(CacheStore):
    """Bytes of samples never exceed the limit; what Python adds to each (100 bytes) is not counted."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, Stored] = {}
        self.used_bytes = 0
        self.full = False
        self.damaged = 0

    def get(self, i: int) -> Stored | None:
        return self._kept.get(i)

    def put(self, i: int, data: Stored) -> None:
        size = data.nbytes if isinstance(data, np.ndarray) else len(data)
        if isinstance(data, np.ndarray):
            # A view would keep the whole batch alive that it was cut from.
            data = np.ascontiguousarray(data).copy()
            data.setflags(write=False)
        with self._lock:
            if i in self._kept:
                return
            if self.used_bytes + size > self._limit:
                self.full = True
                return
            self._kept[i] = data
            self.used_bytes += size

    def describe(self) -> str:
        return "in memory"

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
            self.used_bytes = 0
            self.full = False


class DiskStore(CacheStore):
    """Samples in files of a local disk, shared by all ranks of a host and kept for later runs.

    Each is a file in `DIR/IDENTITY/`, under its final name only when it is whole. A count of the
    bytes in use, under a lock, keeps all ranks together within the limit. A disk that is full, or
    fails, ends the caching with one line; the run goes on. `limit_bytes` holds for the files of
    this data set, whoever wrote them.
    """

    def __init__(self, directory: Path, identity: str, limit_bytes: int) -> None:
        """DataError where the directory cannot be made or written to."""
        self._root = directory / identity
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._stopped = False
        self.full = False
        self.damaged = 0
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._used = os.open(self._root / _USED_FILE, flags, 0o666)
            self._users = os.open(self._root / _USERS_FILE, flags, 0o666)
        except OSError as error:
            raise unwritable(self._root, error) from None
        self._count_if_alone()

    def _count_if_alone(self) -> None:
        """What a killed process had reserved, and its unfinished files, are given back by the next
        one that has the directory to itself."""
        with suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            total = 0
            for folder in self._root.iterdir():
                if folder.is_dir():
                    total += _swept_bytes(folder)
            os.pwrite(self._used, total.to_bytes(8, "little"), 0)
        with suppress(OSError):
            # From exclusive to shared; a run that starts now sees that somebody is here.
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def get(self, i: int) -> Stored | None:
        try:
            entry = read_regular(self._path(i))
        except OSError:
            return None
        data = from_entry(i, entry)
        if data is None:
            self._drop(i, len(entry))
        return data

    def _drop(self, i: int, size: int) -> None:
        with self._lock:
            self.damaged += 1
        with suppress(OSError):
            self._path(i).unlink()
            self._reserve(-size)

    def put(self, i: int, data: Stored) -> None:
        if self._stopped:
            return
        entry = to_entry(i, data)
        path = self._path(i)
        part = part_path(path)
        try:
            if path.exists() or not self._reserve(len(entry)):
                return
            try:
                path.parent.mkdir(exist_ok=True)
                with open_part(part) as file:
                    file.write(entry)
                # Unlike a rename, a link tells that another rank was faster.
                os.link(part, path)
            except OSError as error:
                self._reserve(-len(entry))
                if not isinstance(error, FileExistsError):
                    raise
            finally:
                with suppress(OSError):
                    part.unlink()
        except OSError as error:
            self._stop(unwritable(path, error))

    def _reserve(self, size: int) -> bool:
        """Adds to the bytes in use, if they stay within the limit. One rank and thread at a time."""
        with self._lock:
            fcntl.flock(self._used, fcntl.LOCK_EX)
            try:
                used = int.from_bytes(os.pread(self._used, 8, 0), "little")
                if size > 0 and used + size > self._limit:
                    self.full = True
                    return False
                os.pwrite(self._used, max(0, used + size).to_bytes(8, "little"), 0)
                return True
            finally:
                fcntl.flock(self._used, fcntl.LOCK_UN)

    def _stop(self, error: DataError) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = self.full = True
        sys.stderr.write(f"paceline: warning: the cache takes no more samples: {error.cause}\n")

    @property
    def used_bytes(self) -> int:
        return int.from_bytes(os.pread(self._used, 8, 0), "little")

    def describe(self) -> str:
        stopped = ", takes no more" if self._stopped else ""
        return f"in {self._root}{stopped}"

    def close(self) -> None:
        """The files stay."""
        with suppress(OSError):
            os.close(self._used)
            os.close(self._users)

    def _path(self, i: int) -> Path:
        return self._root / f"{i % _FOLDERS:03x}" / str(i)


def _swept_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        if path.name.startswith("."):
            path.unlink(missing_ok=True)
        else:
            total += path.stat().st_size
    return total


def to_entry(i: int, data: Stored) -> bytes:
    """One sample as a file: a header (checksum, index, length, shape) and the bytes."""
    shape = data.shape if isinstance(data, np.ndarray) else (0, 0, 0)
    content = data.tobytes() if isinstance(data, np.ndarray) else data
    fields = (i, len(content), *shape)
    return _HEADER.pack(_MAGIC, _checksum(fields, content), *fields) + content


def from_entry(i: int, entry: bytes) -> Stored | None:
    """The sample; None for whatever is not exactly what was written, after a crash or on a failing
    disk."""
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
