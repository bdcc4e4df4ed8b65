"""`RunLock`: at most one job writes to a run folder at a time.

In: a run folder. Out: a lock on the file `run.lock` in it, held by rank 0 until it leaves; or one error
that names the host and the process that hold it. The operating system releases the lock when its process
ends, however it ends: nothing has to be cleaned up after `kill -9`.

The lock is `flock`. Between hosts it holds on file systems that pass it on (NFS 4, NFS 3 with `lockd`,
Lustre mounted with `flock`). NFS mounted with `nolock` keeps it to one host. A file system without locks
is reported in `note`.
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
# Longer than another process looks whether the lock is held (`refuse_if_held`).
_PROBE_S = 0.2
# How long a holder that has just taken the lock may need to write down who it is.
_IDENTITY_WAIT_S = 1.0


class RunFolderInUseError(PacelineError):
    """Another process is writing to the run folder."""


class RunFolderGoneError(PacelineError):
    """The run folder was deleted or moved while the run was using it."""


class RunLock:
    """A lock that this process holds. `note` tells where the file system cannot lock."""

    def __init__(self, folder: Path, descriptor: int, note: str = "") -> None:
        self._folder = folder
        self._descriptor = descriptor
        self.note = note

    @classmethod
    def acquire(cls, folder: Path, wait_s: float = _PROBE_S) -> RunLock:
        """Takes the lock of the existing `folder`; waits up to `wait_s` for a holder that is leaving."""
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
        """Raises where another process holds the lock. Takes and writes nothing."""
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
        """The lock, or None where another process holds it."""
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
            # The holder before us removes the file as it leaves: this may be the removed one.
            if _is_same(file, descriptor):
                break
            os.close(descriptor)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        return cls(folder, descriptor, note)

    def check(self) -> None:
        """Before a write: raises where the folder is gone, or in other hands since."""
        if _is_same(self._folder / NAME, self._descriptor):
            return
        if not (self._folder / "config.toml").exists():
            raise RunFolderGoneError(
                f"run folder {self._folder} is gone: it was deleted or moved during the run",
                "start the run again, or continue it where it is now with --resume auto --output",
            )
        # Somebody has removed the lock file alone.
        again = RunLock.acquire(self._folder)
        os.close(self._descriptor)
        self._descriptor = again._descriptor

    def release(self) -> None:
        """Removes the file, then lets go of the lock; again, it does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if _is_same(self._folder / NAME, self._descriptor):
                (self._folder / NAME).unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """An error within this context releases the lock."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _is_same(file: Path, descriptor: int) -> bool:
    """Whether `file` is still the very file that is open."""
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
    """`process 17 on node3`, as the holder has written it."""
    deadline = time.monotonic() + _IDENTITY_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            who = json.loads(file.read_bytes())
            return f"process {int(who['pid'])} on {ascii(str(who['host'])[:64])[1:-1]}"
        time.sleep(_PAUSE_S)
    return "another process"
