"""The folder of a run, and the checkpoint from which a resumed run starts.

`claim_run_folder` chooses a new folder, or the folder of the run to resume, and locks this folder for the
process. It never chooses the folder of a different run.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.config import DEFAULTS, SECTIONS, RunConfig, with_choices, with_defaults
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.files import LEFTOVERS, open_regular, read_regular
from paceline.core.settings import flatten, settings_class
from paceline.core.untrusted import ParseError, parse_toml
from paceline.train.checkpoint import CheckpointStore, write_atomically

NAME = "run.lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_PAUSE_S = 0.05
# Longer than the time for which `refuse_if_held` in another process holds the lock.
_PROBE_S = 0.2
# Time that a new holder of the lock may need to write its host and process id into the file.
_IDENTITY_WAIT_S = 1.0


class RunFolderInUseError(PacelineError):
    """Raised if another process is writing to the run folder."""


class RunFolderGoneError(PacelineError):
    """Raised if the run folder was deleted or moved while the run was using it."""


class RunLock:
    """A lock with which at most one job at a time writes to a run folder.

    Rank 0 holds an `flock` on the file `run.lock`. The operating system releases it when the process
    ends, even after `kill -9`. The lock works across hosts if the file system supports that (NFS 4, NFS 3
    with `lockd`, Lustre mounted with `flock`). On NFS mounted with `nolock`, it works within one host. If
    the file system cannot lock, `note` says so.
    """

    def __init__(self, folder: Path, descriptor: int, note: str = "") -> None:
        self._folder = folder
        self._descriptor = descriptor
        self.note = note

    @classmethod
    def acquire(cls, folder: Path, wait_s: float = _PROBE_S) -> RunLock:
        """Locks an existing folder.

        Args:
            folder: The run folder.
            wait_s: Time to wait for the current holder to exit.

        Raises:
            RunFolderInUseError: If another process still holds the lock.
        """
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
        """Raises RunFolderInUseError if another process has locked `folder`. Writes nothing."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            open_regular(folder / NAME) as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(folder) from None
            except OSError:  # the file system has no locks
                return

    @classmethod
    def _try(cls, folder: Path) -> RunLock | None:
        """Returns the lock, or None if another process holds it."""
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
            # The previous holder removes the file when it exits, so this may be the removed file.
            if _is_same(file, descriptor):
                break
            os.close(descriptor)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # on a full disk, the lock works without an identity
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        return cls(folder, descriptor, note)

    def check(self) -> None:
        """Checks before a write that the folder exists and no other process has locked it.

        Raises:
            RunFolderGoneError: If the folder was deleted or moved.
            RunFolderInUseError: If another process has locked the folder.
        """
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
        """Removes the lock file and releases the lock. A second call does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if _is_same(self._folder / NAME, self._descriptor):
                (self._folder / NAME).unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def _is_same(file: Path, descriptor: int) -> bool:
    """Returns True if the path `file` still names the open file of `descriptor`."""
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
    """Returns the holder of the lock, such as `process 17 on node3`, as the lock file names it."""
    deadline = time.monotonic() + _IDENTITY_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            who = json.loads(read_regular(file))
            return f"process {int(who['pid'])} on {ascii(str(who['host'])[:64])[1:-1]}"
        time.sleep(_PAUSE_S)
    return "another process"


# Settings that a resumed run may change while it remains the same run.
LOCAL_SETTINGS = frozenset({
    "run.output", "run.resume", "run.log_interval", "run.threads", "run.traced_steps", "run.trackers",
    "run.report_port", "run.eval_details", "checkpoint.on_sigusr1", "checkpoint.on_sigusr2",
    "checkpoint.background", "checkpoint.keep", "data.workers",
    # Caches do not change batches.
    "data.cache", "data.cache_mib", "data.cache_dir", "data.cache_form",
})  # fmt: skip
# Settings that affect the results of a run only by rounding, if at all. A finished run may be resumed
# with changed values of these settings.
_NEUTRAL_SETTINGS = LOCAL_SETTINGS | {
    "run.name", "run.device", "data.dir", "data.max_corrupt_share",
    "comm.timeout_s", "comm.rendezvous_timeout_s", "comm.min_ranks",
    "checkpoint.interval_epochs", "checkpoint.interval_steps", "checkpoint.keep_best",
}  # fmt: skip


def is_neutral(name: str) -> bool:
    """Returns True for a setting that a resume may change, because it changes at most the rounding."""
    return name in _NEUTRAL_SETTINGS or _is_of_kernels(name)


def _is_of_kernels(name: str) -> bool:
    """Returns True for a setting that changes only which kernels compute a step.

    If memory runs out or a kernel fails, a user can change such a setting and resume. The class of these
    settings declares `EXACT = False`.
    """
    section, *owner, _ = name.split(".")
    if not owner or section not in SECTIONS:
        return name == "run.cuda_graphs"
    kind = settings_class(SECTIONS[section], owner[0], name)
    return not getattr(kind, "EXACT", True)


ROOT = Path("runs")
# Launchers end all ranks before they start new ones, but processes take a moment to exit.
_RESTART_WAIT_S = 10.0


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the checkpoint from which the run starts.

    `note`, `older` and `damaged` are set on rank 0 only.

    Attributes:
        path: Path of the run folder.
        resume_from: The checkpoint from which the run starts; None for a new run.
        note: A note to display: why `--resume auto` starts a new run, or which checkpoints are
            damaged.
        older: Checkpoints to use if `resume_from` is damaged; empty if the user named the checkpoint.
        damaged: Checkpoints that turned out to be damaged.
    """

    path: Path
    resume_from: Path | None
    note: str = field(default="", compare=False)
    older: tuple[Path, ...] = field(default=(), compare=False)
    damaged: tuple[Path, ...] = field(default=(), compare=False)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def holds_its_checkpoint(self) -> bool:
        """True if `resume_from` is a checkpoint of this folder."""
        file = self.resume_from
        return file is not None and file.resolve().parent == self.checkpoints.resolve()

    def discard(self) -> None:
        """Removes the folder, and the default place of run folders, if they are empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
            if self.path.parent == ROOT:
                ROOT.rmdir()

    def metrics(self, rank: int) -> Path:
        """Returns the path of the file with a rank's events."""
        return self.path / ("metrics.jsonl" if rank == 0 else f"metrics.rank{rank}.jsonl")

    def sweep(self) -> None:
        """Removes temporary files that a killed process has left."""
        for leftover in self.path.glob(LEFTOVERS):
            leftover.unlink(missing_ok=True)

    def write_config(self, config: RunConfig) -> None:
        write_atomically(self.path / "config.toml", config.to_toml().encode())


@contextlib.contextmanager
def undone_on_error(folder: RunFolder, lock: RunLock | None) -> Iterator[None]:
    """If the block raises an error, releases the lock and removes the folder if it is empty."""
    try:
        yield
    except BaseException:
        if lock is not None:
            lock.release()
        folder.discard()
        raise


def claim_run_folder(config: RunConfig, *, restarted: bool) -> tuple[RunFolder, RunLock]:
    """Chooses the folder of a run and locks it before anything is written to it.

    Args:
        config: The settings of the run.
        restarted: True if torchrun restarted this process after a failure. Such a run always resumes.

    Returns:
        The folder and its lock.

    Raises:
        RunFolderInUseError: If another process holds the lock. In that case nothing has changed.
        ConfigError: If the folder contains another run.
        PacelineError: If the folder cannot be used.
    """
    if config.run.output and not restarted:
        # Checked first, because "already holds a run" would be misleading while that run is active.
        with _explained(config):
            RunLock.refuse_if_held(Path(config.run.output))
    with _explained(config):
        output = Path(config.run.output) if config.run.output else None
        first = _choose(config, restarted, output)
        wait_s = _RESTART_WAIT_S if restarted else _PROBE_S
        lock = RunLock.acquire(first.path, wait_s=wait_s)
    with undone_on_error(first, lock), _explained(config):
        # Another process may have changed the folder before it was locked.
        again = _choose(config, restarted, first.path)
    note = "; ".join(filter(None, (first.note or again.note, lock.note)))
    return replace(again, note=note), lock


@contextlib.contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    """Replaces file system errors by an error of one line that names the folder."""
    try:
        yield
    except OSError as error:
        where = config.run.resume if config.run.resume not in ("", "auto") else config.run.output
        raise PacelineError(
            f"{where or ROOT} cannot be used: {error.strerror}", "check --output and --resume"
        ) from None


def _choose(config: RunConfig, restarted: bool, output: Path | None) -> RunFolder:
    resume = config.run.resume or ("auto" if restarted else "")
    if resume and resume != "auto":
        return _from_file(Path(resume), output, restarted=restarted)
    if output is None:
        unfinished, note = _unfinished(config) if resume == "auto" else (None, "")
        if unfinished is None:
            return RunFolder(_new_folder(config.run.name), None, note)
        return _resumed(unfinished)
    if not (output / "config.toml").exists():
        output.mkdir(parents=True, exist_ok=True)
        return RunFolder(output, None)
    if resume == "auto":
        return _resumed(output)
    raise _occupied(output)


def _from_file(file: Path, output: Path | None, *, restarted: bool) -> RunFolder:
    """Returns the folder of a run that resumes from `file`, a checkpoint or a run folder.

    After a restart by the launcher, the run resumes from the checkpoints that it has saved since
    the first start.
    """
    if file.is_dir():
        newest = CheckpointStore(file / "checkpoints", 1).newest()
        if newest is None:
            raise CheckpointError(f"no checkpoint in {file / 'checkpoints'}", "check --resume")
        file = newest
    if not file.is_file():
        raise CheckpointError(f"no checkpoint at {file}", "check --resume")
    home = file.resolve().parent.parent
    if output is None:
        output = home if (home / "config.toml").exists() else _new_folder("resumed")
    elif (output / "config.toml").exists() and output.resolve() != home and not restarted:
        raise _occupied(output)
    output.mkdir(parents=True, exist_ok=True)
    since = _resumed(output) if restarted else None
    if since is None or since.resume_from is None:
        return RunFolder(output, file)
    return replace(since, older=(*since.older, file))


def _occupied(output: Path) -> ConfigError:
    return ConfigError(
        "run.output", str(output), "already holds a run",
        "add --resume auto to continue it, or choose another --output",
    )  # fmt: skip


def _resumed(folder: Path) -> RunFolder:
    """Returns the folder for a resume from its newest checkpoint, with older ones as fallbacks."""
    store = CheckpointStore(folder / "checkpoints", 1)
    files = store.candidates()
    if files == [store.best]:
        files = []  # a kill came between writing and linking the best checkpoint: the run starts over
    return RunFolder(folder, files[0] if files else None, older=tuple(files[1:]))


def _unfinished(config: RunConfig) -> tuple[Path | None, str]:
    """Finds the newest folder of an unfinished run with this name and configuration.

    If no such folder exists, takes the newest unfinished run that differs only in kernel settings.

    Returns:
        The folder and ""; or None and a note that names the settings in which the newest unfinished
        run differs.
    """
    # A folder always records the global batch, but a command need not give a global batch.
    ignored = LOCAL_SETTINGS | (
        {"run.global_batch_size"} if config.run.global_batch_size is None else set()
    )
    note = f"no unfinished run of this configuration in {ROOT}/; a new one starts"
    difference, other_kernels = "", None
    for folder in sorted(ROOT.glob(f"{config.run.name}-[0-9]*"), reverse=True):
        if (folder / "summary.json").exists():
            continue
        try:
            there = parse_toml(read_regular(folder / "config.toml"))
            if there.pop("defaults", DEFAULTS) != DEFAULTS:
                continue
            if not all(isinstance(table, dict) for table in there.values()):
                continue
            found = flatten(with_defaults(there))
            # The choices of its recipe are in the folder.
            own = config if config.run.pending is None else with_choices(config, there)
            wanted = flatten(own.in_use())
        except (OSError, ParseError, ConfigError):
            continue
        names = (found.keys() | wanted.keys()) - ignored
        different = sorted(name for name in names if found.get(name) != wanted.get(name))
        if not different:
            return folder, ""
        if all(map(_is_of_kernels, different)):
            other_kernels = other_kernels or folder
        difference = difference or f" ({folder} differs in {', '.join(different[:3])})"
    return other_kernels, "" if other_kernels else note + difference


def _new_folder(name: str) -> Path:
    """Creates `runs/NAME-001`, or the folder with the next free number.

    Runs that start at the same time get separate folders.
    """
    number = 1
    while True:
        taken = [int(p.name.rpartition("-")[2]) for p in ROOT.glob(f"{name}-[0-9]*")
                 if p.name.rpartition("-")[2].isdigit()]  # fmt: skip
        number = max([number, *(n + 1 for n in taken)])
        folder = ROOT / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
