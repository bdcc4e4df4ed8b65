from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.train.run_folder import RunFolder, claim_run_folder
from paceline.train.run_lock import NAME, RunFolderGoneError, RunFolderInUseError, RunLock
from small_runs import run_small, small_config


def test_a_second_holder_is_refused_with_host_and_process_of_the_first(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    with pytest.raises(RunFolderInUseError) as caught:
        RunLock.acquire(tmp_path)
    assert f"process {os.getpid()} on {socket.gethostname()}" in caught.value.cause
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    RunLock.acquire(tmp_path).release()


def test_a_lock_whose_process_was_killed_is_free(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"host": "elsewhere", "pid": 1}')
    RunLock.acquire(tmp_path).release()


def test_a_holder_that_could_not_write_its_name(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    (tmp_path / NAME).write_text("")
    with pytest.raises(RunFolderInUseError, match="another process"):
        RunLock.acquire(tmp_path)
    lock.release()


def test_the_file_of_a_holder_that_leaves_at_that_moment_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened, then removed by its holder: a lock on it would keep nobody out."""
    real, calls = fcntl.flock, [0]

    def flock(descriptor: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            (tmp_path / NAME).unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock.acquire(tmp_path)
    assert calls[0] == 2
    with pytest.raises(RunFolderInUseError):
        RunLock.acquire(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder, lock = claim_run_folder(small_config(tmp_path / "run"), restarted=False)
    assert "No locks available" in folder.note
    lock.release()


def test_a_folder_that_is_deleted_or_moved_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").touch()
    lock = RunLock.acquire(folder)
    lock.check()
    (folder / NAME).unlink()
    lock.check()  # the lock file alone is made anew
    with pytest.raises(RunFolderInUseError):
        RunLock.acquire(folder)
    shutil.rmtree(folder)
    with pytest.raises(RunFolderGoneError):
        lock.check()
    folder.mkdir()
    with pytest.raises(RunFolderGoneError):
        lock.check()
    lock.release()


def test_what_happens_before_the_lock_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts and ends its run between our look at the folder and our lock."""
    real = RunLock._try.__func__  # type: ignore[attr-defined]

    def late(cls: type[RunLock], folder: Path) -> RunLock | None:
        RunFolder(folder, None).write_config(small_config(""))
        return real(cls, folder)  # type: ignore[no-any-return]

    monkeypatch.setattr(RunLock, "_try", classmethod(late))
    with pytest.raises(ConfigError, match=r"run\.output"):
        claim_run_folder(small_config(tmp_path / "run"), restarted=False)
    assert not (tmp_path / "run" / NAME).exists()


def test_a_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    run_small(tmp_path / "run")
    assert not (tmp_path / "run" / NAME).exists()
