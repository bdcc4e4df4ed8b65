"""`DiskStore`: samples in files of a local disk, shared by all ranks of a host, kept for later runs.

In: samples by index. Out: the same ones, in `DIR/IDENTITY/`, a file each, under its final name only when
it is whole. A count of the bytes in use, under a lock, keeps all ranks together within the limit. A disk
that is full, or fails, ends the caching with one line; the run goes on.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.whole_file import open_part, part_path
from paceline.data.caching.cache_entry import from_entry, to_entry
from paceline.data.caching.cache_store import Data
from paceline.data.written_file import unwritable

_USED_FILE = "used"
_USERS_FILE = "users"
_FOLDERS = 1024


class DiskStore:
    """`limit_bytes` holds for the files of this data set, whoever wrote them."""

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

    def get(self, i: int) -> Data | None:
        try:
            entry = self._path(i).read_bytes()
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

    def put(self, i: int, data: Data) -> None:
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
