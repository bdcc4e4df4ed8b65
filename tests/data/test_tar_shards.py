from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.decoding.decode import decode
from paceline.data.settings import DataSettings
from paceline.data.sources import tar_shards
from paceline.data.sources.source import open_source
from paceline.data.sources.tar_shards import TarShards

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


@pytest.fixture(params=[".tar", ".tar.gz"])
def shards(request: pytest.FixtureRequest, tmp_path: Path, write_tar: Write, samples: Samples):
    paths = [
        write_tar(tmp_path / f"train-0001{request.param}", samples(7, first=5)),
        write_tar(tmp_path / f"train-0000{request.param}", samples(5)),
    ]
    opened = TarShards(paths)
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


def test_threads_read_at_once(shards: TarShards) -> None:
    def first_pixel(i: int) -> int:
        return int(np.asarray(decode(shards.read(i), 1))[0, 0])

    wanted = [i % 12 for i in range(600)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(first_pixel, wanted)) == wanted


def open_descriptors() -> int:
    """Counted by asking for each, so it works where there is no /proc."""

    def is_open(descriptor: int) -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return False
        return True

    return sum(map(is_open, range(1024)))


def test_more_shards_than_descriptors(
    tmp_path: Path, write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_shards, "_DESCRIPTORS_KEPT", 2)
    paths = [write_tar(tmp_path / f"train-{i}.tar", samples(1, first=i)) for i in range(6)]
    before = open_descriptors()
    source = TarShards(paths)
    for i in (5, 0, 3, 5, 1):
        assert np.asarray(decode(source.read(i), 1))[0, 0] == i
    assert open_descriptors() - before == 2
    source.close()
    assert open_descriptors() == before


def test_label_outside_the_classes(tmp_path: Path, write_tar: Write, samples: Samples) -> None:
    path = write_tar(tmp_path / "train-0000.tar", samples(5, classes=5))
    with pytest.raises(DataError, match=r"train-0000\.tar:000003\.png: label 3 is outside the 3"):
        TarShards([path], ["a", "b", "c"])


def test_no_image_in_any_shard(tmp_path: Path, write_tar: Write) -> None:
    path = write_tar(tmp_path / "train-0000.tar", [("a.bmp", b"x"), ("b.txt", b"y")])
    with pytest.raises(DataError, match=r"train-0000\.tar: no image in it"):
        TarShards([path])


def test_a_damaged_shard_among_good_ones_is_named(
    tmp_path: Path, write_tar: Write, samples: Samples
) -> None:
    good = write_tar(tmp_path / "train-0000.tar", samples(3))
    bad = tmp_path / "train-0001.tar"
    bad.write_bytes(good.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-0001\.tar: not a readable tar shard"):
        TarShards([good, bad])


@pytest.mark.parametrize("damage", ["cut", "flip", "no gzip"])
def test_damaged_gzip(tmp_path: Path, write_tar: Write, samples: Samples, damage: str) -> None:
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
        TarShards([path])


def test_a_shard_that_vanishes_is_no_corrupt_image(
    tmp_path: Path, write_tar: Write, samples: Samples
) -> None:
    source = TarShards([write_tar(tmp_path / "train-0000.tar", samples(3))])
    (tmp_path / "train-0000.tar").unlink()
    with pytest.raises(DataError, match=r"train-0000\.tar: cannot be read \(No such file"):
        source.read(0)


def test_a_shard_cut_under_the_run(tmp_path: Path, write_tar: Write, samples: Samples) -> None:
    path = write_tar(tmp_path / "train-0000.tar", samples(3))
    source = TarShards([path])
    source.read(2)
    os.truncate(path, 700)
    with pytest.raises(DataError, match=r"train-0000\.tar: ends at byte \d+, but was longer"):
        source.read(2)
    source.close()


def test_a_directory_in_the_place_of_a_shard(tmp_path: Path) -> None:
    (tmp_path / "train-0000.tar").mkdir()
    with pytest.raises(DataError, match=r"train-0000\.tar: cannot be read \(Is a directory"):
        TarShards([tmp_path / "train-0000.tar"])


def test_too_much_to_unpack_into_memory(
    tmp_path: Path, write_tar: Write, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "train-0000.tar.gz", samples(3))
    monkeypatch.setattr(tar_shards, "_COMPRESSED_LIMIT_BYTES", 10)
    with pytest.raises(DataError, match="gunzip"):
        TarShards([path])


def test_tiny_imagenet(tiny_imagenet: Path) -> None:
    settings = DataSettings(dir=str(tiny_imagenet))
    train, val = open_source(settings, "train"), open_source(settings, "val")
    assert len(train.classes) == len(val.classes) == 25
    assert np.bincount(train.labels).tolist() == [500] * 25
    assert np.bincount(val.labels).tolist() == [50] * 25
    grey = 0
    for source in (train, val):
        for i in range(len(source)):
            data = source.read(i)
            assert isinstance(data, bytes)
            grey += _is_grey_jpeg(data)
    assert grey == 264
    for source in (train, val):
        first = next(i for i in range(len(source)) if _is_grey_jpeg(source.read(i)))
        image = decode(source.read(first), 3)
        pixels = np.asarray(image)
        assert pixels.shape == (64, 64, 3)
        assert (pixels[..., 0] == pixels[..., 2]).all()
        assert pixels.std() > 5
        source.close()


def _is_grey_jpeg(data: bytes) -> bool:
    """Reads the number of components in the frame header, without Pillow."""
    at = 2
    while data[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[at + 9] == 1
