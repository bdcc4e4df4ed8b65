"""Files of a chunk, read by one call: the same bytes as one by one, and the same errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.region import bulk_read
from paceline.data.region.bulk_read import BulkRead
from paceline.data.region.library import RegionUnavailableError, region_library
from paceline.data.region.pieces import Pieces
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
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = BulkRead(opened).all([0, 7], go_on)
    BulkRead(opened).all([7, 7, 6, 0], go_on)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1  # the one that is kept
    assert [type(data) for data in found] == [memoryview, memoryview]
    assert [bytes(data) for data in found] == [opened.read(0), opened.read(7)]
    opened.close()


def test_few_of_those_are_open_at_once(
    tmp_path: Path, write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_shards, "_DESCRIPTORS_KEPT", 2)
    opened = TarShards([write_tar(tmp_path / f"train-{i:02}.tar", samples(1)) for i in range(12)])
    opened.read(0)
    opened.read(1)
    read, counts = BulkRead(opened), []
    assert read._library is not None
    together = read._library.read_many

    def counting(pieces: Pieces) -> None:
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        together(pieces)

    monkeypatch.setattr(read._library, "read_many", counting)
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = read.all(range(12), go_on)
    assert [bytes(data) for data in found] == [opened.read(i) for i in range(12)]
    assert counts == [before + bulk_read._MOST_OPENED]
    assert [type(data) for data in found].count(memoryview) == 2 + bulk_read._MOST_OPENED
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


@pytest.mark.parametrize("replaced", [False, True])
def test_and_one_that_vanishes_or_is_replaced(
    plain: tuple[TarShards, Path], monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Looked for once a second: the reader who looks must not hide it from the one who can say it."""
    opened, path = plain
    clock = [100.0]
    monkeypatch.setattr(shard_file.time, "monotonic", lambda: clock[0])
    read = BulkRead(opened)
    read.all([4], go_on)
    path.unlink()
    if replaced:
        path.write_bytes(bytes(5000))
    read.all([4], go_on)  # the descriptor is good, and nobody looks yet
    clock[0] += 1.5
    words = "has changed since the start" if replaced else r"cannot be read \(No such file"
    with pytest.raises(DataError, match=rf"train-0\.tar: {words}"):
        read.all([4], go_on)


def test_large_files_are_left_to_the_ordinary_way(
    plain: tuple[TarShards, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = plain
    size = len(opened.read(0))
    wanted = [opened.read(i) for i in range(5)]
    monkeypatch.setattr(bulk_read, "_MOST_BYTES", 2 * size + 10)
    found = BulkRead(opened).all(range(5), go_on)
    assert [bytes(data) for data in found] == wanted
    assert [type(data) for data in found][:3] == [memoryview, memoryview, bytes]
    monkeypatch.setattr(bulk_read, "_LARGEST_FILE", 1)
    assert {type(data) for data in BulkRead(opened).all(range(5), go_on)} == {bytes}


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, -4), (0, [4, 4])])
def test_pieces_that_cannot_be_are_refused(offset: int, size: int | list[int]) -> None:
    numbers = [np.array([value], dtype=np.int64) for value in (3, offset)]
    with pytest.raises(ValueError, match="piece"):
        Pieces(
            numbers[0].astype(np.int32), numbers[1], np.atleast_1d(size), numbers[0].astype("u8")
        )


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
