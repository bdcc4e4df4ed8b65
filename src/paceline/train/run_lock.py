"""`RunLock`: at most one job at a time writes to a run folder.

Rank 0 holds an `flock` on the file `run.lock`. The operating system releases it when the process
ends, also after `kill -9`. It works across hosts on file systems that support it (NFS 4, NFS 3 with
`lockd`, Lustre mounted with `flock`), and within one host on NFS mounted with `nolock`. A file system
without locks is reported in `note`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import PacelineError

NAME = "run.lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_PAUSE_S = 0.05
# Longer than another process holds the lock to probe it (`refuse_if_held`).
_PROBE_S = 0.2
# Time that a new holder may need to write its identity.
_IDENTITY_WAIT_S = 1.0


class RunFolderInUseError(PacelineError):
    """Another process is writing to the run folder."""


class RunFolderGoneError(PacelineError):
    """The run folder was deleted or moved while the run was using it."""


class RunLock:
    """A lock held by this process. `note` is not empty if the file system cannot lock."""

    def __init__(self, folder: Path, descriptor: int, note: str = "") -> None:
        self._folder = folder
        self._descriptor = descriptor
        self.note = note

    @classmethod
    def acquire(cls, folder: Path, wait_s: float = _PROBE_S) -> RunLock:
        """Locks the existing `folder`; waits up to `wait_s` for the current holder to exit."""
        deadline = time.monotonic() + wait_s
        while True:
            lock = cls._try(folder)
            if lock is not None:
                return lock
            if time.monotonic() >= deadline:
                raise _in_use(folder)
            time.sleep(_PAUSE_S)

    @staticmethod
    def refuse_if_held(folder: Path) -> None:
        """Raises RunFolderInUseError if another process holds the lock. Writes nothing."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            (folder / NAME).open("rb") as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(folder) from None
            except OSError:  # no locks here
                return

    @classmethod
    def _try(cls, folder: Path) -> RunLock | None:
        """The lock, or None if another process holds it."""
        file, note = folder / NAME, ""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(file, flags, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                note = f"{folder} is not locked against a second job ({error.strerror})"
            # The previous holder removes the file on exit: this may be the removed one.
            if _is_same(file, descriptor):
                break
            os.close(descriptor)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # a full disk: the lock works without an identity
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        return cls(folder, descriptor, note)

    def check(self) -> None:
        """Before a write: raises if the folder is gone or another process has locked it."""
        if _is_same(self._folder / NAME, self._descriptor):
            return
        if not (self._folder / "config.toml").exists():
            raise RunFolderGoneError(
                f"run folder {self._folder} is gone: it was deleted or moved during the run",
                "start the run again, or resume it where it is now with --resume auto --output",
            )
        # Only the lock file was removed.
        again = RunLock.acquire(self._folder)
        os.close(self._descriptor)
        self._descriptor = again._descriptor

    def release(self) -> None:
        """Removes the file and releases the lock; a second call does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if _is_same(self._folder / NAME, self._descriptor):
                (self._folder / NAME).unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """An error inside the context releases the lock."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _is_same(file: Path, descriptor: int) -> bool:
    """Whether `file` is still the open file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _in_use(folder: Path) -> RunFolderInUseError:
    return RunFolderInUseError(
        f"{folder} is in use by {_holder(folder / NAME)}",
        "wait for it to end, stop it, or choose another --output",
    )


def _holder(file: Path) -> str:
    """`process 17 on node3`, from the identity in the file."""
    deadline = time.monotonic() + _IDENTITY_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            who = json.loads(file.read_bytes())
            return f"process {int(who['pid'])} on {ascii(str(who['host'])[:64])[1:-1]}"
        time.sleep(_PAUSE_S)
    return "another process"
