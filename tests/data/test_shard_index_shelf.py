from __future__ import annotations

import errno
import io
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.inspection.inspect_set import inspect_set
from paceline.data.packing.pack_source import open_splits
from paceline.data.sources import shard_index_shelf
from paceline.data.sources.retry import Retry
from paceline.data.sources.shard_index_file import index_path
from paceline.data.sources.shard_index_shelf import IndexShelf
from paceline.data.sources.tar_shards import TarShards

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


@pytest.fixture
def shards(
    tmp_path: Path, write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Three shards, as if they were large ones, and a cache of the user's own."""
    monkeypatch.setattr(shard_index_shelf, "_KEPT_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return [
        write_tar(tmp_path / "data" / f"train-{i}.tar", samples(4, first=4 * i)) for i in range(3)
    ]


def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The shards that are scanned from now on."""
    seen: list[Path] = []
    real = shard_index_shelf.scan_shard

    def watched(path: Path, content: object) -> object:
        seen.append(path)
        return real(path, content)

    monkeypatch.setattr(shard_index_shelf, "scan_shard", watched)
    return seen


def test_built_once(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = scans(monkeypatch)
    first = TarShards(shards)
    assert scanned == shards
    assert all(index_path(path).is_file() for path in shards)
    second = TarShards(shards)
    assert scanned == shards
    assert [second.name(i) for i in range(12)] == [first.name(i) for i in range(12)]
    assert [second.read(i) for i in range(12)] == [first.read(i) for i in range(12)]
    assert second.labels.tolist() == first.labels.tolist()
    assert first.remark == second.remark == ""


def test_a_small_set_leaves_nothing_behind(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index_shelf, "_KEPT_FROM_BYTES", 64 << 20)
    before = sorted(shards[0].parent.iterdir())
    assert len(TarShards(shards)) == 12
    assert sorted(shards[0].parent.iterdir()) == before


def test_an_index_older_than_its_shard(
    shards: list[Path], write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    TarShards(shards)
    write_tar(shards[1], samples(5, first=100))
    scanned = scans(monkeypatch)
    source = TarShards(shards)
    assert scanned == [shards[1]]
    assert len(source) == 13
    assert source.name(4) == "train-1.tar:000100.png"
    assert "index of train-1.tar belongs to an older state of the shard: built anew" in (
        source.remark
    )
    assert TarShards(shards).remark == ""


def test_a_damaged_index(shards: list[Path]) -> None:
    TarShards(shards)
    content = bytearray(index_path(shards[2]).read_bytes())
    content[-40] ^= 1
    index_path(shards[2]).write_bytes(content)
    source = TarShards(shards)
    assert len(source) == 12
    assert "index of train-2.tar is damaged: built anew" in source.remark


def read_only(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """As on a read-only file system, which root could write to."""
    real = shard_index_shelf.write_index

    def refuse(path: Path, *rest: object) -> None:
        if path.parent.name in places:
            raise DataError(f"{path}: cannot be written (Read-only file system)")
        real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_index_shelf, "write_index", refuse)


def test_shards_where_nothing_can_be_written(
    tmp_path: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, "data")
    TarShards(shards)
    assert not index_path(shards[0]).exists()
    assert len(list((tmp_path / "cache/paceline/index").glob("*.index"))) == 3
    scanned = scans(monkeypatch)
    assert len(TarShards(shards)) == 12
    assert scanned == []


def test_no_place_at_all(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(monkeypatch, "data", "index")
    source = TarShards(shards)
    assert len(source) == 12
    assert "index of train-0.tar cannot be kept: no place to write to and 2 more" in source.remark


def test_a_damaged_shard_leaves_no_index(shards: list[Path]) -> None:
    os.truncate(shards[1], 3000)
    with pytest.raises(DataError, match=r"train-1\.tar: (truncated|not a readable)"):
        TarShards(shards)
    assert not index_path(shards[1]).exists()


def test_a_flaky_file_system_while_scanning(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = io.BufferedReader.read, [errno.EIO, errno.ESTALE]

    class Flaky(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 2000 and failures:
                raise OSError(failures.pop(), "some trouble")
            return real(self, size)

    monkeypatch.setattr(Path, "open", lambda path, mode="rb": Flaky(io.FileIO(path, mode)))
    retry = Retry(2, sleep=lambda wait_s: None)
    monkeypatch.setattr(shard_index_shelf, "_KEPT_FROM_BYTES", 64 << 20)
    assert len(IndexShelf(retry).take(shards)) == 3
    assert retry.count == 2
    failures += [errno.EIO] * 3
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(some trouble\)"):
        IndexShelf(retry).take(shards)


BUILDER = """
import sys, time
from pathlib import Path
from paceline.data.sources import shard_index_shelf
from paceline.data.sources.tar_shards import TarShards
shard_index_shelf._KEPT_FROM_BYTES = 0
real, count = shard_index_shelf.scan_shard, 0
def scan(path, content):
    global count
    count += 1
    time.sleep(0.05)  # as long as the others need to arrive
    return real(path, content)
shard_index_shelf.scan_shard = scan
source = TarShards(sorted(Path(sys.argv[1]).glob("train-*.tar")))
print(count, len(source))
"""


def test_of_many_processes_one_builds(shards: list[Path]) -> None:
    """All ranks of a host start at once."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(shards[0].parent)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(4)
    ]  # fmt: skip
    answers = [process.communicate()[0].split() for process in started]
    assert [answer[1] for answer in answers] == ["12"] * 4
    assert sum(int(answer[0]) for answer in answers) == 3
    assert not list(shards[0].parent.glob(".*.tmp"))


def test_a_user_without_a_home(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert len(TarShards(shards)) == 12
    assert index_path(shards[0]).is_file()
    for path in shards:
        index_path(path).unlink()
    read_only(monkeypatch, "data")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    source = TarShards(shards)
    assert "index of train-0.tar cannot be kept: no place to write to" in source.remark


def test_the_lock_of_a_read_only_place_is_in_the_cache(
    tmp_path: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, "data")
    monkeypatch.setattr(os, "access", lambda path, mode: path != shards[0].parent)
    before = sorted(shards[0].parent.iterdir())
    assert len(TarShards(shards)) == 12
    assert sorted(shards[0].parent.iterdir()) == before
    kept = tmp_path / "cache/paceline/index"
    assert len(list(kept.glob("*.lock"))) == 1
    assert len(list(kept.glob("*.index"))) == 3


def test_whoever_only_looks_leaves_nothing_behind(tmp_path: Path, shards: list[Path]) -> None:
    index_path(shards[0]).write_bytes(b"unfit")
    before = {path: path.read_bytes() for path in shards[0].parent.iterdir()}
    assert inspect_set(str(shards[0].parent)).problems == []
    sources = open_splits(str(shards[0].parent))
    assert len(sources["train"]) == 12
    assert {path: path.read_bytes() for path in shards[0].parent.iterdir()} == before
    assert not (tmp_path / "cache").exists()
