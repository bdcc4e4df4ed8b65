"""`CacheStore`: where samples stay between epochs; and the one in memory.

In: samples by index. Out: the same ones, as long as they fit. Nothing is ever pushed out: every sample is
wanted once an epoch, so whatever came first is as good as anything that comes later, and a cache that
swaps would miss all the time.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

Data = bytes | npt.NDArray[np.uint8]


class CacheStore(Protocol):
    """Used by many threads at once. Never fails: what cannot be kept is not kept."""

    @property
    def full(self) -> bool:
        """Whether a sample was too many already. A smaller one may still fit."""

    def get(self, i: int) -> Data | None: ...

    def put(self, i: int, data: Data) -> None: ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


class MemoryStore:
    """Bytes of samples never exceed the limit; what Python adds to each (100 bytes) is not counted."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, Data] = {}
        self.used_bytes = 0
        self.full = False

    def get(self, i: int) -> Data | None:
        return self._kept.get(i)

    def put(self, i: int, data: Data) -> None:
        size = data_bytes(data)
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


def data_bytes(data: Data) -> int:
    return data.nbytes if isinstance(data, np.ndarray) else len(data)
