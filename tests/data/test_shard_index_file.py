from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.data.sources.shard_index_file import (
    UnfitIndexError,
    index_path,
    read_index,
    write_index,
)
from paceline.data.sources.shard_stamp import ShardStamp
from paceline.data.sources.tar_index import ShardIndex, scan_shard


@pytest.fixture
def shard(tmp_path: Path, write_tar: Callable[..., Path], samples: Callable[..., list]) -> Path:
    return write_tar(tmp_path / "train-0.tar", samples(12))


def scanned(path: Path) -> ShardIndex:
    with path.open("rb") as content:
        return scan_shard(path, content)


def test_it_comes_back_as_it_was(shard: Path) -> None:
    index = scanned(shard)
    write_index(index_path(shard), index, ShardStamp.of(shard))
    found = read_index(index_path(shard), ShardStamp.of(shard))
    assert found is not None
    for name in ("offsets", "sizes", "labels"):
        assert np.array_equal(getattr(found, name), getattr(index, name))
        assert getattr(found, name).dtype == np.int64
    assert [found.names[i] for i in range(12)] == [index.names[i] for i in range(12)]
    assert index_path(shard).name == "train-0.tar.index"


def test_none_there(shard: Path) -> None:
    assert read_index(index_path(shard), ShardStamp.of(shard)) is None


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


def test_another_version(shard: Path) -> None:
    path = index_path(shard)
    write_index(path, scanned(shard), ShardStamp.of(shard))
    path.write_bytes(path.read_bytes().replace(b"index.1", b"index.2", 1))
    with pytest.raises(UnfitIndexError, match="another version"):
        read_index(path, ShardStamp.of(shard))
    path.unlink()
    path.mkdir()
    with pytest.raises(UnfitIndexError, match="cannot be read"):
        read_index(path, ShardStamp.of(shard))


@pytest.mark.parametrize(
    ("name", "value"), [("offsets", -512), ("sizes", -1), ("sizes", 2**62), ("offsets", 2**62)]
)
def test_places_outside_of_the_shard_are_not_believed(shard: Path, name: str, value: int) -> None:
    """The checksum has no key: whoever writes an index can make one that holds."""
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
