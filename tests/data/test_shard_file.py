from __future__ import annotations

import errno
import gzip
import os
import threading
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.sources import shard_file
from paceline.data.sources.retry import Retry
from paceline.data.sources.shard_file import ShardFile, UnpackedShard
from paceline.data.sources.shard_stamp import ShardStamp

CONTENT = bytes(range(256)) * 8


@pytest.fixture(params=[True, False], ids=["kept open", "opened each time"])
def shard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_file, "_LOOK_EVERY_S", 0.0)
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
    with pytest.raises(DataError, match=r"train-0\.tar: has changed since the start, or was repl"):
        opened.read(10, 5)


@pytest.mark.parametrize("size", [100, len(CONTENT), 5000])
def test_replaced_by_another(shard: tuple[ShardFile, Path], size: int) -> None:
    opened, path = shard
    other = path.with_name("other")
    other.write_bytes(bytes(size))
    set_time(other, 1)
    other.replace(path)
    with pytest.raises(DataError, match="has changed since the start, or was replaced"):
        opened.read(10, 5)


def test_vanished(shard: tuple[ShardFile, Path]) -> None:
    opened, path = shard
    path.unlink()
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(No such file"):
        opened.read(10, 5)


def test_cut(shard: tuple[ShardFile, Path]) -> None:
    opened, path = shard
    os.truncate(path, 1000)
    with pytest.raises(DataError, match="ends at byte 1000, but was longer at the start"):
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

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.close()
    assert wrong == []
    assert calls[0] > 800


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_transient_errors_leave_no_descriptor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train-0.tar"
    path.write_bytes(CONTENT)
    opened = ShardFile(path, ShardStamp.of(path), Retry(1, sleep=lambda wait_s: None), True)
    real, calls = os.pread, [0]

    def every_other(descriptor: int, size: int, offset: int) -> bytes:
        calls[0] += 1
        if calls[0] % 2:
            raise OSError(errno.EIO, "some trouble")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", every_other)
    before = descriptors()
    for i in range(20):
        assert opened.read(i, 9) == CONTENT[i : i + 9]
    assert descriptors() <= before + 1
    opened.close()
    assert descriptors() == before


def test_a_small_file_that_unpacks_to_much(tmp_path: Path) -> None:
    path = tmp_path / "train-0.tar.gz"
    path.write_bytes(gzip.compress(bytes(5 << 20)))
    with pytest.raises(DataError, match=r"train-0\.tar\.gz: unpacks to more than 0\.0 GiB.*gunzip"):
        UnpackedShard(path, (5 << 20) - 1)
    assert len(UnpackedShard(path, 5 << 20).data) == 5 << 20
