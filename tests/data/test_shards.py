from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.small import samples, write_tar
from paceline.core.errors import DataError
from paceline.data import inspect_set, open_splits
from paceline.data.image import decode
from paceline.data.sources import index_store, tar_index
from paceline.data.sources import shards as tar_shards
from paceline.data.sources.index_store import (
    IndexStore,
    UnfitIndexError,
    index_path,
    open_shards,
    read_index,
    write_index,
)
from paceline.data.sources.shards import TarShards
from paceline.data.sources.storage import Retry, ShardStamp
from paceline.data.sources.tar_index import ShardIndex, scan_shard

BUILDER = """
import sys, time
from pathlib import Path
from paceline.data.sources import index_store, tar_index
from paceline.data.sources.index_store import open_shards
index_store._KEPT_FROM_BYTES = 0
real, count = tar_index.scan_shard, 0
def scan(path, content):
    global count
    count += 1
    time.sleep(0.05)  # as long as the others need to arrive
    return real(path, content)
tar_index.scan_shard = scan
source = open_shards(sorted(Path(sys.argv[1]).glob("train-*.tar")))
print(count, len(source))
"""


@pytest.fixture(params=[".tar", ".tar.gz"])
def shards(request: pytest.FixtureRequest, tmp_path: Path):
    paths = [
        write_tar(tmp_path / f"train-0001{request.param}", samples(7, first=5)),
        write_tar(tmp_path / f"train-0000{request.param}", samples(5)),
    ]
    opened = open_shards(paths)
    yield opened
    opened.close()


def test_samples_of_all_shards_in_order(shards: TarShards) -> None:
    assert len(shards) == 12
    assert shards.labels.dtype == np.int64
    assert shards.labels.tolist() == [i % 3 for i in range(12)]
    assert shards.classes == ["0", "1", "2"]
    for i in range(12):
        assert np.asarray(decode(shards.read(i), 1))[0, 0] == i
    assert shards.name(4).endswith(":000004.png")
    assert shards.name(5).startswith("train-0001.tar")
    with pytest.raises(IndexError):
        shards.read(12)


def open_descriptors() -> int:
    """Counts open descriptors one by one, which also works without /proc."""

    def is_open(descriptor: int) -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return False
        return True

    return sum(map(is_open, range(1024)))


def test_more_shards_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_shards, "DESCRIPTORS_KEPT", 2)
    paths = [write_tar(tmp_path / f"train-{i}.tar", samples(1, first=i)) for i in range(6)]
    before = open_descriptors()
    source = open_shards(paths)
    for i in (5, 0, 3, 5, 1):
        assert np.asarray(decode(source.read(i), 1))[0, 0] == i
    assert open_descriptors() - before == 2
    source.close()
    assert open_descriptors() == before


def test_no_image_in_any_shard(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train-0000.tar", [("a.bmp", b"x"), ("b.txt", b"y")])
    with pytest.raises(DataError, match=r"train-0000\.tar: no image in it"):
        open_shards([path])


@pytest.mark.parametrize("damage", ["cut", "flip", "no gzip"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "train-0000.tar.gz", samples(20))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 0xFF
    else:
        content = bytearray(gzip.decompress(content))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-0000\.tar\.gz: not a readable gzip"):
        open_shards([path])


def test_too_much_to_unpack_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "train-0000.tar.gz", samples(3))
    monkeypatch.setattr(tar_shards, "_COMPRESSED_LIMIT_BYTES", 10)
    with pytest.raises(DataError, match="gunzip"):
        open_shards([path])


# --- indexes, kept on disk -------------------------------------------------------------------------


@pytest.fixture
def large_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three shards, as if they were large ones, and a cache of the user's own."""
    monkeypatch.setattr(index_store, "_KEPT_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return [
        write_tar(tmp_path / "data" / f"train-{i}.tar", samples(4, first=4 * i)) for i in range(3)
    ]


def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The shards that are scanned from now on."""
    seen: list[Path] = []
    real = tar_index.scan_shard

    def watched(path: Path, content: object) -> object:
        seen.append(path)
        return real(path, content)

    monkeypatch.setattr(tar_index, "scan_shard", watched)
    return seen


def test_built_once(large_shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = scans(monkeypatch)
    first = open_shards(large_shards)
    assert scanned == large_shards
    assert all(index_path(path).is_file() for path in large_shards)
    second = open_shards(large_shards)
    assert scanned == large_shards
    assert [second.name(i) for i in range(12)] == [first.name(i) for i in range(12)]
    assert [second.read(i) for i in range(12)] == [first.read(i) for i in range(12)]
    assert second.labels.tolist() == first.labels.tolist()
    assert first.note == second.note == ""


def test_a_small_set_leaves_nothing_behind(
    large_shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_store, "_KEPT_FROM_BYTES", 64 << 20)
    before = sorted(large_shards[0].parent.iterdir())
    assert len(open_shards(large_shards)) == 12
    assert sorted(large_shards[0].parent.iterdir()) == before


def test_an_index_older_than_its_shard(
    large_shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_shards(large_shards)
    write_tar(large_shards[1], samples(5, first=100))
    scanned = scans(monkeypatch)
    source = open_shards(large_shards)
    assert scanned == [large_shards[1]]
    assert len(source) == 13
    assert source.name(4) == "train-1.tar:000100.png"
    assert "index of train-1.tar belongs to an older state of the shard: rebuilt" in (source.note)
    assert open_shards(large_shards).note == ""


def read_only(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Makes writes fail as on a read-only file system, also for root."""
    real = index_store.write_index

    def refuse(path: Path, *rest: object) -> None:
        if path.parent.name in places:
            raise DataError(f"{path}: cannot be written (Read-only file system)")
        real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(index_store, "write_index", refuse)


def test_a_damaged_shard_leaves_no_index(large_shards: list[Path]) -> None:
    os.truncate(large_shards[1], 3000)
    with pytest.raises(DataError, match=r"train-1\.tar: (truncated|not a readable)"):
        open_shards(large_shards)
    assert not index_path(large_shards[1]).exists()


def test_a_flaky_file_system_while_scanning(
    large_shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = io.BufferedReader.read, [errno.EIO, errno.ESTALE]

    class Flaky(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 2000 and failures:
                raise OSError(failures.pop(), "some trouble")
            return real(self, size)

    monkeypatch.setattr(tar_index, "open_regular", lambda path: Flaky(io.FileIO(path)))
    retry = Retry(2, sleep=lambda wait_s: None)
    monkeypatch.setattr(index_store, "_KEPT_FROM_BYTES", 64 << 20)
    assert len(IndexStore(retry).take(large_shards)) == 3
    assert retry.count == 2
    failures += [errno.EIO] * 3
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(some trouble\)"):
        IndexStore(retry).take(large_shards)


def test_of_many_processes_one_builds(large_shards: list[Path]) -> None:
    """All ranks of a host start at once."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(large_shards[0].parent)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(4)
    ]  # fmt: skip
    answers = [process.communicate()[0].split() for process in started]
    assert [answer[1] for answer in answers] == ["12"] * 4
    assert sum(int(answer[0]) for answer in answers) == 3
    assert not list(large_shards[0].parent.glob(".*.tmp"))


def test_the_lock_of_a_read_only_place_is_in_the_cache(
    tmp_path: Path, large_shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, "data")
    monkeypatch.setattr(os, "access", lambda path, mode: path != large_shards[0].parent)
    before = sorted(large_shards[0].parent.iterdir())
    assert len(open_shards(large_shards)) == 12
    assert sorted(large_shards[0].parent.iterdir()) == before
    kept = tmp_path / "cache/paceline/index"
    assert len(list(kept.glob("*.lock"))) == 1
    assert len(list(kept.glob("*.index"))) == 3


def test_whoever_only_looks_leaves_nothing_behind(tmp_path: Path, large_shards: list[Path]) -> None:
    index_path(large_shards[0]).write_bytes(b"unfit")
    before = {path: path.read_bytes() for path in large_shards[0].parent.iterdir()}
    assert inspect_set(str(large_shards[0].parent)).problems == []
    sources = open_splits(str(large_shards[0].parent))
    assert len(sources["train"]) == 12
    assert {path: path.read_bytes() for path in large_shards[0].parent.iterdir()} == before
    assert not (tmp_path / "cache").exists()


# --- the file of an index --------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "train-0.tar", samples(12))


def scanned(path: Path) -> ShardIndex:
    with path.open("rb") as content:
        return scan_shard(path, content)


def test_it_comes_back_as_it_was(shard: Path) -> None:
    index = scanned(shard)
    write_index(index_path(shard), index, ShardStamp.of(shard))
    found = read_index(index_path(shard), ShardStamp.of(shard))
    for name in ("offsets", "sizes", "labels"):
        assert np.array_equal(getattr(found, name), getattr(index, name))
        assert getattr(found, name).dtype == np.int64
    assert [found.names[i] for i in range(12)] == [index.names[i] for i in range(12)]
    assert index_path(shard).name == "train-0.tar.index"


def test_any_flipped_byte_and_any_cut_is_noticed(shard: Path) -> None:
    path, stamp = index_path(shard), ShardStamp.of(shard)
    write_index(path, scanned(shard), stamp)
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(UnfitIndexError):
            read_index(path, stamp)
    for length in range(0, len(good), 5):
        path.write_bytes(good[:length])
        with pytest.raises(UnfitIndexError):
            read_index(path, stamp)


def test_a_shard_that_is_another(shard: Path) -> None:
    path = index_path(shard)
    write_index(path, scanned(shard), ShardStamp.of(shard))
    before = shard.stat()
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(UnfitIndexError, match="belongs to an older state of the shard"):
        read_index(path, ShardStamp.of(shard))
    # Equal in size and time, as a copying tool may leave it: the probe tells.
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UnfitIndexError, match="older state"):
        read_index(path, ShardStamp.of(shard))


@pytest.mark.parametrize(
    ("name", "value"), [("offsets", -512), ("sizes", -1), ("sizes", 2**62), ("offsets", 2**62)]
)
def test_places_outside_of_the_shard_are_not_believed(shard: Path, name: str, value: int) -> None:
    """The checksum has no key, so a hostile index can have a valid one."""
    index = scanned(shard)
    getattr(index, name)[3] = value
    write_index(index_path(shard), index, ShardStamp.of(shard))
    with pytest.raises(UnfitIndexError, match="outside of the shard"):
        read_index(index_path(shard), ShardStamp.of(shard))


@pytest.mark.parametrize(
    ("at", "value"), [(64, -1), (64, 10**15), (64, 11), (72, 10**15), (72, -1)]
)
def test_counts_that_do_not_fit_under_a_right_checksum(shard: Path, at: int, value: int) -> None:
    path, stamp = index_path(shard), ShardStamp.of(shard)
    write_index(path, scanned(shard), stamp)
    body = bytearray(path.read_bytes()[:-32])
    body[at : at + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(bytes(body) + hashlib.sha256(body).digest())
    with pytest.raises(UnfitIndexError):
        read_index(path, stamp)
