"""`CachedSource`: a source whose samples are kept for later epochs.

In: a source and a store. Out: a source with the same samples, labels and names. Kept raw, a sample is the
bytes of its file; kept decoded, its pixels, upright and in the channels of the run, so that whatever
follows sees what it would have seen without. Hits and misses are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.caching.cache_disk import DiskStore
from paceline.data.caching.cache_store import CacheStore, Data, MemoryStore
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.source_identity import source_identity
from paceline.data.sources.source_protocol import (
    ArraySource,
    Source,
    Split,
    source_counters,
    with_remark,
)
from paceline.data.sources.synthetic import SyntheticImages

_MIB = 2**20


def cached(source: Source, settings: DataSettings, split: Split) -> Source:
    """`source` behind the cache that the settings ask for; each split has its own. DataError: a
    directory that cannot be written to; ConfigError: a cache that could be of no use."""
    if settings.cache == "none":
        return source
    if isinstance(source, ArraySource | SyntheticImages):
        raise ConfigError(
            "data.cache",
            settings.cache,
            "these images are in memory already, or made up on the spot",
            "set data.cache = 'none'",
        )
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


class CachedSource:
    """`channels` None keeps samples as they are stored, else decoded to so many channels."""

    def __init__(
        self, source: Source, store: CacheStore, channels: int | None, limit_mib: int
    ) -> None:
        self.kept = source
        self._store = store
        self._channels = channels
        self._limit_mib = limit_mib
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        groups = getattr(source, "groups", None)
        if groups is not None:
            self.groups: Sequence[int] = groups

    @property
    def classes(self) -> Sequence[str]:
        return self.kept.classes

    @property
    def labels(self) -> Int64:
        return self.kept.labels

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, i: int) -> Data:
        """From the store, or else from the source, which may fail with DataError."""
        data = self._store.get(i)
        with self._lock:
            self._hits += data is not None
            self._misses += data is None
        if data is not None:
            return data
        data = self.kept.read(i)
        if self._channels is not None and self._store.full:
            return data  # who crops it need not decode all of it
        data = self._form(data)
        self._store.put(i, data)
        return data

    def _form(self, data: Data) -> Data:
        if self._channels is None:
            return data
        try:
            image = decode(data, self._channels)
        except CorruptImage:
            return data  # whoever decodes it again finds the same, and has a log for it
        pixels = np.asarray(image)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    def name(self, i: int) -> str:
        return self.kept.name(i)

    def cache_counters(self) -> dict[str, int]:
        found = source_counters(self.kept) | {
            "cache_hits": self._hits,
            "cache_misses": self._misses,
        }
        damaged = getattr(self._store, "damaged", 0)
        return found | ({"cache_damaged": damaged} if damaged else {})

    @property
    def remark(self) -> str:
        form = "raw" if self._channels is None else "decoded"
        read = self._hits + self._misses
        share = f", {self._hits} of {read} reads from it" if read else ""
        text = f"{form} cache {self._store.describe()}, at most {self._limit_mib} MiB{share}"
        return with_remark(text, self.kept)

    def close(self) -> None:
        self.kept.close()
        self._store.close()
