"""A lock between processes of one host, held by the operating system, so that none outlives its holder.

In: the path of a file that is made for it. Out: whether the lock is held, for as long as a block lasts.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """True while held; False where `wait` is off and somebody else holds it; None where this place
    knows no locks (a read-only directory, some network file systems)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield None
        return
    try:
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True
