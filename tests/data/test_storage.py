from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data.small import in_threads
from paceline.core.errors import DataError
from paceline.data.sources import storage
from paceline.data.sources.folders import ImageFolder
from paceline.data.sources.storage import (
    Retry,
    ShardFile,
    ShardStamp,
    file_lock,
    write_file,
)

CONTENT = bytes(range(256)) * 8


@pytest.fixture(params=[True, False], ids=["kept open", "opened each time"])
def shard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "_CHECK_EVERY_S", 0.0)
    path = tmp_path / "train-0.tar"
    path.write_bytes(CONTENT)
    opened = ShardFile(
        path, ShardStamp.of(path), Retry(2, sleep=lambda wait_s: None), request.param
    )
    assert opened.read(10, 5) == CONTENT[10:15]
    yield opened, path
    opened.close()


def set_time(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def test_changed_in_place(shard: tuple[ShardFile, Path]) -> None:
    opened, path = shard
    path.write_bytes(CONTENT[::-1])
    set_time(path, 1)
    with pytest.raises(DataError, match=r"train-0\.tar: was changed or repl"):
        opened.read(10, 5)


@pytest.mark.parametrize("size", [100, len(CONTENT), 5000])
def test_replaced_by_another(shard: tuple[ShardFile, Path], size: int) -> None:
    opened, path = shard
    other = path.with_name("other")
    other.write_bytes(bytes(size))
    set_time(other, 1)
    other.replace(path)
    with pytest.raises(DataError, match="was changed or replaced"):
        opened.read(10, 5)


def test_vanished(shard: tuple[ShardFile, Path]) -> None:
    opened, path = shard
    path.unlink()
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(No such file"):
        opened.read(10, 5)


def test_cut(shard: tuple[ShardFile, Path]) -> None:
    opened, path = shard
    os.truncate(path, 1000)
    with pytest.raises(DataError, match="was truncated to 1000 bytes since the start"):
        opened.read(900, 200)


def test_a_flaky_file_system(
    shard: tuple[ShardFile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = shard
    real, failures = os.pread, [errno.ESTALE, errno.EIO]

    def flaky(descriptor: int, size: int, offset: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "some trouble")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", flaky)
    assert opened.read(0, 9) == CONTENT[:9]
    failures += [errno.EIO] * 3
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(some trouble\)"):
        opened.read(0, 9)


def test_a_stale_descriptor_is_opened_anew_under_other_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train-0.tar"
    path.write_bytes(CONTENT)
    opened = ShardFile(path, ShardStamp.of(path), Retry(50, sleep=lambda wait_s: None), True)
    real, calls, wrong = os.pread, [0], []

    def flaky(descriptor: int, size: int, offset: int) -> bytes:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise OSError(errno.ESTALE, "stale")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", flaky)

    def read_all() -> None:
        for i in range(200):
            if opened.read(i, 30) != CONTENT[i : i + 30]:
                wrong.append(i)

    in_threads(*[read_all] * 4)
    opened.close()
    assert wrong == []
    assert calls[0] > 800


# --- retries ---------------------------------------------------------------------------------------


class Flaky:
    """Fails `failures` times, then answers."""

    def __init__(self, failures: int, number: int) -> None:
        self.left, self.number = failures, number

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise OSError(self.number, "some trouble")
        return "read"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_trouble_that_passes(number: int) -> None:
    waits: list[float] = []
    retry = Retry(6, sleep=waits.append)
    assert retry.call(Flaky(3, number)) == "read"
    assert retry.count == 3
    assert waits == [0.1, 0.2, 0.4]


def test_trouble_that_stays() -> None:
    waits: list[float] = []
    retry = Retry(8, sleep=waits.append)
    flaky = Flaky(100, errno.EIO)
    with pytest.raises(OSError, match="some trouble"):
        retry.call(flaky)
    assert flaky.left == 100 - 9
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"image")
    source = ImageFolder(tmp_path, retry=Retry(2, sleep=lambda wait_s: None))
    flaky = Flaky(2, errno.EIO)
    monkeypatch.setattr(
        "paceline.data.sources.folders.read_regular", lambda path: flaky() and path.read_bytes()
    )
    assert source.read(0) == b"image"
    assert source.retry.count == 2
    flaky.left = 3
    with pytest.raises(DataError, match=r"a/1\.jpg: cannot be read \(some trouble\)"):
        source.read(0)


# --- locks and whole files -------------------------------------------------------------------------


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path) as first:
        assert first is True
        with file_lock(path, wait=False) as second:
            assert second is False
    with file_lock(path, wait=False) as third:
        assert third is True


def test_a_place_without_locks(tmp_path: Path) -> None:
    with file_lock(tmp_path / "absent" / "lock") as held:
        assert held is None


def test_a_file_larger_than_this_process_may_write(tmp_path: Path) -> None:
    """A real refusal of the operating system, as a full disk gives it."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"file: cannot be written \(File too large\); free"):
            write_file(tmp_path / "file", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
