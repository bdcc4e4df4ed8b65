"""`Retry`: storage that fails for a while is asked again, a limited number of times.

In: a way to read. Out: what it read, or its last error. Only errors that can pass by themselves are
retried: a network file system that lost its server, not a file that is not there. Retries are counted.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EREMOTEIO,
    }
)  # fmt: skip
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Retry:
    """Waits 0.1 s, 0.2 s, 0.4 s … at most 5 s between tries. Shared by all readers of a source."""

    def __init__(self, retries: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self.retries = retries
        self._sleep = sleep
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Reads that were tried again, since the beginning."""
        return self._count

    def call(self, read: Callable[[], T]) -> T:
        """OSError: not transient, or still there after the last try."""
        wait_s = _FIRST_WAIT_S
        for _ in range(self.retries):
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            with self._lock:
                self._count += 1
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return read()
