"""The folder of a run, its checkpoint to resume from, and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.train.run_folder import (
    NAME,
    RunFolder,
    RunFolderGoneError,
    RunFolderInUseError,
    RunLock,
    claim_run_folder,
)
from refusals import refused
from small_runs import small_config


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def choose(output: str = "", *, restarted: bool = False, **values: Any) -> RunFolder:
    folder, lock = claim_run_folder(small_config(output, **values), restarted=restarted)
    lock.release()
    return folder


def started(folder: RunFolder, *, step: int | None = None, finished: bool = False) -> None:
    folder.write_config(small_config(""))
    if step is not None:
        folder.checkpoints.mkdir(exist_ok=True)
        (folder.checkpoints / f"step-{step:08d}.pt").touch()
    if finished:
        (folder.path / "summary.json").touch()


def test_new_runs_are_numbered() -> None:
    names = [str(choose().path) for _ in range(3)]
    assert names == ["runs/small-001", "runs/small-002", "runs/small-003"]
    found = choose(run__resume="auto")
    assert found == RunFolder(Path("runs/small-004"), None), "there is nothing to resume"


@pytest.mark.parametrize("restarted", [False, True])
def test_auto_finds_the_newest_unfinished_run_of_this_configuration(restarted: bool) -> None:
    folders = [choose() for _ in range(4)]
    started(folders[0], step=5)
    started(folders[1], step=7)
    started(folders[2], step=9, finished=True)
    folders[3].write_config(small_config("", optim__lr=0.5))
    found = choose(restarted=restarted, run__resume="" if restarted else "auto", data__workers=3)
    path = Path("runs/small-002")
    assert found == RunFolder(path, path / "checkpoints/step-00000007.pt")
    other = choose(run__resume="auto", optim__lr=0.7)
    assert other.resume_from is None
    assert "runs/small-004 differs in optim.lr" in other.note


@pytest.mark.parametrize(
    "change",
    [
        {"run__accel__fused_convolutions": "auto"},
        {"run__accel__recompute_norms": True},
        {"run__cuda_graphs": "off"},
        {"run__accel__compile": "off", "run__accel__fused_norm": "off"},
    ],
)
def test_auto_finds_a_run_that_another_kernel_computed(change: dict[str, Any]) -> None:
    folder = choose()
    started(folder, step=5)
    found = choose(run__resume="auto", **change)
    assert found.resume_from == folder.path / "checkpoints/step-00000005.pt"
    assert found.note == ""
    assert choose(run__resume="auto", optim__lr=0.7, **change).resume_from is None


def test_auto_prefers_the_run_that_the_same_kernels_computed() -> None:
    plain = choose()
    started(plain, step=5)
    fused = choose(run__accel__fused_convolutions="auto")
    started(fused, step=3)
    fused.write_config(small_config("", run__accel__fused_convolutions="auto"))
    assert choose(run__resume="auto").path == plain.path, "though the other one is newer"
    assert choose(run__resume="auto", run__accel__fused_convolutions="auto").path == fused.path
    assert choose(run__resume="auto", run__cuda_graphs="off").path == fused.path, "the newest"


def test_auto_finds_a_run_of_a_version_with_other_settings() -> None:
    folder = choose()
    started(folder, step=5)
    config = folder.path / "config.toml"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("mixup", "cutmix"))]
    config.write_text("".join(kept))
    found = choose(run__resume="auto")
    assert found.resume_from == folder.path / "checkpoints/step-00000005.pt"
    assert choose(run__resume="auto", run__mixup=0.2).resume_from is None
    config.write_text("".join(kept).replace("[run]\n", "[run]\ntensorboard = false\n"))
    assert choose(run__resume="auto").resume_from is None


@pytest.mark.parametrize(
    "content",
    [b"run = 3\n", b"[run\n", b"\xff", b"[run.mine]\na = 1\n", b"[other.mine]\na = 1\n",
     b"[run]\nstrategy = 5\n"],
)  # fmt: skip
def test_auto_ignores_an_invalid_configuration(content: bytes) -> None:
    folder = choose()
    started(folder, step=5)
    (folder.path / "config.toml").write_bytes(content)
    assert choose(run__resume="auto") == RunFolder(Path("runs/small-002"), None)


def test_an_output_that_holds_a_run_is_not_overwritten() -> None:
    here = RunFolder(Path("here"), None)
    started(here)
    assert choose("here", restarted=True) == here, "before the first checkpoint"
    started(here, step=3)
    with refused("run.output") as caught:
        choose("here")
    assert "--resume auto" in caught.value.remedy
    file = Path("here/checkpoints/step-00000003.pt")
    assert choose("here", run__resume="auto").resume_from == file
    assert choose(run__resume=str(file)).path.resolve() == Path("here").resolve()
    assert choose(run__resume="here").resume_from == file
    assert choose("there", run__resume=str(file)) == RunFolder(Path("there"), file)


def test_a_restart_resumes_from_what_the_run_has_saved_since() -> None:
    started(RunFolder(Path("a"), None), step=1000)
    started(RunFolder(Path("b"), None), step=5000)
    file = "a/checkpoints/step-00001000.pt"
    with pytest.raises(ConfigError, match=r"run\.output"):
        choose("b", run__resume=file)
    found = choose("b", restarted=True, run__resume=file)
    assert found == RunFolder(Path("b"), Path("b/checkpoints/step-00005000.pt"))


def test_paths_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    for resume in ("nowhere.pt", "empty"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            choose(run__resume=resume)
    for output in ("file/run", "file"):
        with pytest.raises(PacelineError, match="cannot be used: .*--output"):
            choose(output)

    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(PacelineError, match="here cannot be used: Permission denied"):
        choose("here")


# --- RunLock -----------------------------------------------------------------------------------


def test_a_second_holder_is_refused_with_host_and_process_of_the_first(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    with pytest.raises(RunFolderInUseError) as caught:
        RunLock.acquire(tmp_path)
    assert f"process {os.getpid()} on {socket.gethostname()}" in caught.value.cause
    (tmp_path / NAME).write_text("")
    with pytest.raises(RunFolderInUseError, match="another process"):
        RunLock.acquire(tmp_path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / NAME).write_text('{"host": "elsewhere", "pid": 1}')  # its process was killed
    RunLock.acquire(tmp_path).release()


def test_a_file_that_its_holder_removes_at_that_moment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_system_without_locks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder, lock = claim_run_folder(small_config("run"), restarted=False)
    assert "No locks available" in folder.note
    lock.release()


def test_a_folder_that_is_deleted_or_moved_is_noticed() -> None:
    folder = Path("run")
    folder.mkdir()
    (folder / "config.toml").touch()
    lock = RunLock.acquire(folder)
    lock.check()
    (folder / NAME).unlink()
    lock.check()  # creates the lock file again
    with pytest.raises(RunFolderInUseError):
        RunLock.acquire(folder)
    shutil.rmtree(folder)
    with pytest.raises(RunFolderGoneError):
        lock.check()
    folder.mkdir()
    with pytest.raises(RunFolderGoneError):
        lock.check()
    lock.release()


def test_a_run_that_starts_and_ends_before_the_lock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = RunLock.acquire

    def late(folder: Path, **how: Any) -> RunLock:
        RunFolder(folder, None).write_config(small_config(""))
        return acquire(folder, **how)

    monkeypatch.setattr(RunLock, "acquire", late)
    with pytest.raises(ConfigError, match=r"run\.output"):
        claim_run_folder(small_config("run"), restarted=False)
    assert not Path("run", NAME).exists()
