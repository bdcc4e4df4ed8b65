"""`CachedSource`: keeps samples for later epochs, in memory or on a local disk.

A cache keeps encoded files ("raw") or pixels ("decoded"). Decoded pixels are upright and have the
channels of the run. Batches are the same as without a cache. Nothing is evicted: every sample is
read once per epoch, so a cache with eviction would always miss. `MemoryStore` and `DiskStore` keep
the samples and are thread-safe. A sample whose read fails is not kept.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import sys
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.files import open_part, part_path, read_regular
from paceline.data.augment import pixels_of
from paceline.data.image import CorruptImage, decode
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split, Stored, WrappedSource, source_identity
from paceline.data.sources.storage import unwritable

_MIB = 2**20
_USED_FILE = "used"
_USERS_FILE = "users"
_FOLDERS = 1024
_MAGIC = b"plc1"
# Magic number, checksum, sample index, length, height, width, channels. The last three are 0 for
# encoded bytes.
_HEADER = struct.Struct("<4sIqqIII")


def cached(source: Source, settings: DataSettings, split: Split) -> Source:
    """Wraps `source` in the cache that `data.cache` names, if any. Each split has its own cache.

    Args:
        source: The samples of the split.
        settings: Settings with the kind and size limit of the cache.
        split: Name of the split, which separates caches on disk.

    Raises:
        ConfigError: If a cache would be useless for this source.
        DataError: If the cache directory is not writable.
    """
    if source.is_in_memory:
        raise ConfigError(
            "data.cache", settings.cache, "a cache is useless: the images are in memory or generated",
            "set data.cache = 'none'",
        )  # fmt: skip
    if not source.is_constant:
        raise ConfigError(
            "data.cache", settings.cache, f"{source.kind} gives different images at every read",
            "set data.cache = 'none', or move random transforms to `augment`",
        )  # fmt: skip
    decoded = settings.cache_form == "decoded"
    limit = settings.cache_mib * _MIB
    store: MemoryStore | DiskStore
    if settings.cache == "memory":
        store = MemoryStore(limit)
    else:
        form = f"decoded{settings.channels}" if decoded else "raw"
        directory = Path(settings.cache_dir).expanduser()
        store = DiskStore(directory, f"{source_identity(source)}-{split}-{form}", limit)
    return CachedSource(source, store, settings.channels if decoded else None, settings.cache_mib)


class CachedSource(WrappedSource):
    """Reads the samples of another source through a cache."""

    def __init__(
        self, source: Source, store: MemoryStore | DiskStore, channels: int | None, limit_mib: int
    ) -> None:
        """Creates a cached source.

        Args:
            source: The source to read samples from that are not in the cache.
            store: Keeps the cached samples.
            channels: Channels of the decoded images to keep. None keeps what `source.read` returns.
            limit_mib: Size limit in MiB, for a message to the user.
        """
        super().__init__(source)
        self.has_extents, self.pixels, self.retry = False, None, None
        self._store = store
        self._channels = channels
        self._limit_mib = limit_mib
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def read(self, i: int) -> Stored:
        """Returns a sample from the cache, or else from the source. Raises the errors of the source."""
        data = self._store.get(i)
        with self._lock:
            self._hits += data is not None
            self._misses += data is None
        if data is not None:
            return data
        data = self.whole.read(i)
        if self._channels is not None:
            if self._store.full:
                return data  # decoding only the crop is cheaper
            with suppress(CorruptImage):  # the loader decodes the file again and reports it
                data = pixels_of(decode(data, self._channels))
        self._store.put(i, data)
        return data

    def extent(self, i: int) -> None:
        """Returns None, because reads go through the cache."""

    def counters(self) -> dict[str, int]:
        counts = super().counters() | {"cache_hits": self._hits, "cache_misses": self._misses}
        damaged = self._store.damaged
        return counts | ({"cache_damaged": damaged} if damaged else {})

    @property
    def note(self) -> str:
        form = "raw" if self._channels is None else "decoded"
        read = self._hits + self._misses
        hits = f", {self._hits} of {read} reads from it" if read else ""
        text = f"{form} cache {self._store.describe()}, at most {self._limit_mib} MiB{hits}"
        return "; ".join(filter(None, (text, self.whole.note)))

    def close(self) -> None:
        super().close()
        self._store.close()


class MemoryStore:
    """Keeps samples in memory. The size limit does not include Python's 100 bytes per sample.

    Attributes:
        full: True if a sample did not fit. A smaller one may still fit.
        damaged: Number of entries that were found to be damaged.
    """

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
            # A view would keep the whole batch alive.
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


class DiskStore:
    """Keeps samples in files on a local disk, shared by all ranks of a host and by later runs.

    Each sample is a file in `DIR/IDENTITY/`. The file gets its final name when it is complete. All
    ranks of a host share the size limit; a locked file counts the used bytes. If the disk is full
    or fails, a warning is printed, and the run continues without adding samples.
    """

    def __init__(self, directory: Path, identity: str, limit_bytes: int) -> None:
        """Opens or creates the cache of one data set.

        Args:
            directory: Directory that contains all caches.
            identity: Digest of data set, split and stored format, which names the cache's
                subdirectory.
            limit_bytes: Maximum total size of the files in bytes.

        Raises:
            DataError: If the directory cannot be created or written.
        """
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
        """Removes incomplete files and recounts the used bytes, if no other process uses the cache."""
        with suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            total = 0
            for path in self._root.glob("*/*"):
                if path.name.startswith("."):
                    path.unlink(missing_ok=True)
                else:
                    total += path.stat().st_size
            os.pwrite(self._used, total.to_bytes(8, "little"), 0)
        with suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def get(self, i: int) -> Stored | None:
        try:
            entry = read_regular(self._path(i))
        except OSError:
            return None
        data = from_entry(i, entry)
        if data is None:
            with self._lock:
                self.damaged += 1
            with suppress(OSError):
                self._path(i).unlink()
                self._reserve(-len(entry))
        return data

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
                # Unlike a rename, a link fails if another rank was faster.
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
        """Adds `size` to the used bytes. Returns False if the size limit would be exceeded."""
        with self._lock:
            fcntl.flock(self._used, fcntl.LOCK_EX)
            try:
                used = self.used_bytes
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
        sys.stderr.write(f"paceline: warning: the cache adds no more samples: {error.cause}\n")

    @property
    def used_bytes(self) -> int:
        return int.from_bytes(os.pread(self._used, 8, 0), "little")

    def describe(self) -> str:
        stopped = ", adds no more samples" if self._stopped else ""
        return f"in {self._root}{stopped}"

    def close(self) -> None:
        """Closes the file that counts the used bytes. The cached samples remain on disk."""
        with suppress(OSError):
            os.close(self._used)
            os.close(self._users)

    def _path(self, i: int) -> Path:
        return self._root / f"{i % _FOLDERS:03x}" / str(i)


def to_entry(i: int, data: Stored) -> bytes:
    """Encodes a sample as a cache file: header (checksum, index, length, shape), then the bytes."""
    shape = data.shape if isinstance(data, np.ndarray) else (0, 0, 0)
    content = data.tobytes() if isinstance(data, np.ndarray) else data
    fields = (i, len(content), *shape)
    return _HEADER.pack(_MAGIC, _checksum(fields, content), *fields) + content


def from_entry(i: int, entry: bytes) -> Stored | None:
    """Decodes sample `i` from the content of a cache file. Returns None if the content is damaged."""
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
