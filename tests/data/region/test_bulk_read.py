"""Files of a chunk, read by one call: the same bytes as one by one, and the same errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.region import bulk_read
from paceline.data.region.bulk_read import BulkRead
from paceline.data.region.library import RegionUnavailableError, region_library
from paceline.data.sources import shard_file, tar_shards
from paceline.data.sources.tar_shards import TarShards

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]
ORDER = [11, 0, 4, 5, 0, 7, 2]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        region_library()
    except RegionUnavailableError as error:
        pytest.skip(f"no C library: {error}")


@pytest.fixture(params=[".tar", ".tar.gz"])
def shards(request: pytest.FixtureRequest, tmp_path: Path, write_tar: Write, samples: Samples):
    paths = [
        write_tar(tmp_path / f"train-0{request.param}", samples(5)),
        write_tar(tmp_path / f"train-1{request.param}", samples(7, first=5)),
    ]
    opened = TarShards(paths)
    yield opened
    opened.close()


def refuse(i: int) -> bytes:
    raise AssertionError(f"sample {i} was read by the ordinary way")


def go_on() -> None: ...


def test_the_same_bytes_in_any_order(shards: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [shards.read(i) for i in ORDER]
    read = BulkRead(shards)
    if shards.extent(0) is not None:
        monkeypatch.setattr(shards, "read", refuse)
    assert [bytes(data) for data in read.all(ORDER, go_on)] == wanted
    # Again, in the same memory, fewer and then more than before.
    assert [bytes(data) for data in read.all(ORDER[:2], go_on)] == wanted[:2]
    assert [bytes(data) for data in read.all(ORDER * 3, go_on)] == wanted * 3
    assert read.all([], go_on) == []


def test_without_the_library(shards: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RegionUnavailableError("no compiler", "install one")

    monkeypatch.setattr(bulk_read, "region_library", missing)
    read = BulkRead(shards)
    assert read.all(ORDER, go_on) == [shards.read(i) for i in ORDER]


def test_shards_that_are_opened_for_each_read(
    tmp_path: Path, write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_shards, "_DESCRIPTORS_KEPT", 1)
    opened = TarShards([write_tar(tmp_path / f"train-{i}.tar", samples(5)) for i in range(2)])
    found = BulkRead(opened).all([0, 7], go_on)
    assert [type(data) for data in found] == [memoryview, bytes]
    assert [bytes(data) for data in found] == [opened.read(0), opened.read(7)]
    opened.close()


@pytest.fixture
def plain(tmp_path: Path, write_tar: Write, samples: Samples):
    path = write_tar(tmp_path / "train-0.tar", samples(5))
    opened = TarShards([path])
    yield opened, path
    opened.close()


def test_a_shard_that_changes_is_found_out(plain: tuple[TarShards, Path]) -> None:
    opened, path = plain
    read = BulkRead(opened)
    read.all([0, 1], go_on)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"train-0\.tar: has changed since the start"):
        read.all([0, 1], go_on)


def test_so_is_one_that_is_cut(plain: tuple[TarShards, Path]) -> None:
    opened, path = plain
    read = BulkRead(opened)
    read.all([4], go_on)
    os.truncate(path, 600)
    with pytest.raises(DataError, match=r"train-0\.tar: (ends at byte|has changed)"):
        read.all([4], go_on)


def test_and_one_that_vanishes(
    plain: tuple[TarShards, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "_LOOK_EVERY_S", 0.0)
    opened, path = plain
    read = BulkRead(opened)
    read.all([4], go_on)
    path.unlink()
    with pytest.raises(DataError, match=r"train-0\.tar: cannot be read \(No such file"):
        read.all([4], go_on)


def test_descriptors_are_given_back(plain: tuple[TarShards, Path]) -> None:
    opened, _ = plain
    BulkRead(opened).all([0, 1, 2], go_on)
    content = opened._contents[0]
    assert isinstance(content, shard_file.ShardFile)
    lent = content.lend()
    assert lent is not None
    assert lent.handle.readers == 1
    lent.give_back()
    assert lent.handle.readers == 0


def test_it_stops_where_nobody_wants_the_result(plain: tuple[TarShards, Path]) -> None:
    class Enough(Exception): ...

    def check() -> None:
        raise Enough

    with pytest.raises(Enough):
        BulkRead(plain[0]).all([0], check)
