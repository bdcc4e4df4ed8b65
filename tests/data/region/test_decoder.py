"""The region decoder gives Pillow's pixels, labels, corrupt samples and errors.

This holds for all kinds of storage, for single samples and for chunks that one call reads.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.region.comparison import outcome, pillow, region
from data.small import assert_equal, encode, eval_loader, samples, train_loader, write_tar
from paceline.core.errors import DataError
from paceline.data import (
    BatchPlan,
    DataSettings,
    EvalLoader,
    RegionUnavailableError,
    Source,
    TrainLoader,
    TrainTransform,
)
from paceline.data.augment import FitTransform
from paceline.data.decode import region as module
from paceline.data.decode.library import RegionLibrary
from paceline.data.decode.region import BulkRead
from paceline.data.prefetch import Progress
from paceline.data.sources import shards as shards_module
from paceline.data.sources import storage
from paceline.data.sources.index_store import open_shards
from paceline.data.sources.shards import TarShards

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
FIT = FitTransform(8, 8, "bilinear")
COUNT = 37
ORDER = [11, 0, 4, 5, 0, 7, 2]
pytestmark = pytest.mark.usefixtures("library")


# --- one sample --------------------------------------------------------------------------------


def encoded(kind: str, mode: str = "RGB") -> bytes:
    return encode(Image.fromarray(PIXELS).convert(mode), kind)


@pytest.mark.parametrize(
    ("data", "stages"),
    [
        (encoded("JPEG"), ["decode", "augment"]),
        (encoded("JPEG", "CMYK"), ["decode", "decode", "augment"]),  # the attempt counts too
        (encoded("PNG"), ["decode", "decode", "augment"]),
        (encoded("WEBP"), ["decode", "decode", "augment"]),
        (PIXELS, ["augment", "augment"]),
        (PIXELS[:, :, :1].copy(), ["augment", "augment"]),
        (PIXELS[:, ::2], ["augment", "decode", "augment"]),
    ],
)
def test_whatever_is_stored(
    library: RegionLibrary, data: bytes | np.ndarray, stages: list[str]
) -> None:
    """JPEGs and whole arrays by the library, all else by Pillow, with equal pixels."""
    added: list[str] = []

    class Noting(Progress):
        def add(self, stage: str, seconds: float) -> None:
            assert seconds > 0
            added.append(stage)

    got = outcome(region(library, FIT), data, (), Noting())
    np.testing.assert_array_equal(got, outcome(pillow(FIT), data))
    assert added == stages


@pytest.mark.parametrize("data", [b"", b"no image", encoded("JPEG")[:-9]])
def test_corrupt_files_have_pillow_s_reason(library: RegionLibrary, data: bytes) -> None:
    found = outcome(region(library, FIT), data)
    assert isinstance(found, str)
    assert found == outcome(pillow(FIT), data)


def test_pixels_are_finished_too(library: RegionLibrary) -> None:
    """Shifted, flipped, with a cutout."""
    chosen = DataSettings(image_size=8, eval_resize=0, augment="pad_crop", crop_padding=2, cutout=3)
    transform = TrainTransform(chosen)
    for number in range(20):
        row = np.random.default_rng(number).random(transform.draws).tolist()
        got = outcome(region(library, transform), PIXELS, row)
        np.testing.assert_array_equal(got, outcome(pillow(transform), PIXELS, row))


def test_samples_that_went_to_pillow_are_counted(library: RegionLibrary) -> None:
    """Counts samples of all threads, and arrays that are not contiguous."""
    decoder = region(library, FIT)
    jpeg, png = encoded("JPEG"), encoded("PNG")
    outcome(decoder, jpeg)
    assert decoder.note() == ""
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda data: outcome(decoder, data), [jpeg, png, PIXELS, PIXELS[:, ::2]] * 500)
        )
    assert decoder.note() == "1,000 of 2,001 samples were decoded by Pillow instead"
    assert pillow(FIT).note() == ""


# --- a chunk at a time -------------------------------------------------------------------------


class OneByOne(Source):
    """A source without extents."""

    def __init__(self, inner: TarShards) -> None:
        self.labels, self.classes = inner.labels, inner.classes
        self._inner = inner

    def read(self, i: int) -> bytes:
        return self._inner.read(i)

    def name(self, i: int) -> str:
        return self._inner.name(i)


def image(i: int) -> bytes:
    """4 is a PNG, 9 CMYK, 14 cut short, 19 no image at all, 24 very tall, 29 grey."""
    draw = np.random.default_rng(i)
    height, width = (1500, 12) if i == 24 else (40 + 5 * i, 90 - i)
    noise = Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    picture = noise.resize((width, height), Image.Resampling.BICUBIC)
    picture = picture.convert({9: "CMYK", 29: "L"}.get(i, "RGB"))
    data = encode(picture, "PNG" if i == 4 else "JPEG", quality=90, progressive=i % 5 == 0)
    return {14: data[: len(data) // 2], 19: b"words, not pixels"}.get(i, data)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[TarShards]:
    def members(numbers: range) -> list[tuple[str, bytes]]:
        return [
            member
            for i in numbers
            for member in ((f"{i:03}.jpg", image(i)), (f"{i:03}.cls", str(i).encode()))
        ]

    paths = [
        write_tar(tmp_path / "train-0.tar", members(range(20))),
        write_tar(tmp_path / "train-1.tar", members(range(20, COUNT))),
    ]
    opened = open_shards(paths)
    yield opened
    opened.close()


def settings(**changes: Any) -> DataSettings:
    usual = {
        "image_size": 24, "eval_resize": 28, "decoder": "region", "max_corrupt_share": 0.2,
        "resident": "off",
    }  # fmt: skip
    return DataSettings(**{**usual, **changes})


def train(
    source: Source, workers: int, epochs: int = 3, batch: int = 36, **more: Any
) -> TrainLoader:
    plan = BatchPlan(COUNT, epochs, batch, batch, 1)
    return train_loader(source, plan, settings(workers=workers, **more), seed=7)


def evaluation(source: Source, workers: int, batch: int = 36) -> EvalLoader:
    return eval_loader(source, settings(workers=workers), batch_size=batch)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"cutout": 6, "interpolation": "bicubic"}, {"augment": "pad_crop"}]
)
def test_training_batches_are_those_of_single_samples(
    shards: TarShards, workers: int, changes: dict[str, Any]
) -> None:
    with (
        train(shards, workers, **changes) as got,
        train(OneByOne(shards), workers, **changes) as wanted,
    ):
        assert_equal(list(got), list(wanted))
        assert {sample.index for sample in got.corrupt} == {14, 19}
        assert got.corrupt == wanted.corrupt
        assert "decoded by Pillow" in got.note()
        if workers < 2:  # two threads may both meet a corrupt file before either has noted it
            assert got.note() == wanted.note()


def test_so_are_those_of_evaluation(shards: TarShards) -> None:
    with evaluation(shards, 2) as got, evaluation(OneByOne(shards), 2) as wanted:
        assert_equal(list(got), list(wanted))


def test_a_closed_loader_is_gone_at_once(shards: TarShards) -> None:
    """The loader is freed at once and not by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for workers in (0, 2):
            loaders = [train(shards, workers, batch=9), evaluation(shards, workers, batch=9)]
            next(loaders[0])
            next(iter(loaders[1]))
            held = [weakref.ref(loader) for loader in loaders]
            for loader in loaders:
                loader.close()
            del loader, loaders
            assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


# --- files read by one call --------------------------------------------------------------------


@pytest.fixture(params=[".tar", ".tar.gz"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TarShards]:
    paths = [
        write_tar(tmp_path / f"train-0{request.param}", samples(5)),
        write_tar(tmp_path / f"train-1{request.param}", samples(7, first=5)),
    ]
    opened = open_shards(paths)
    yield opened
    opened.close()


def refuse(i: int) -> bytes:
    raise AssertionError(f"sample {i} was read by the ordinary way")


def test_the_same_bytes_in_any_order(both: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [both.read(i) for i in ORDER]
    read = BulkRead(both)
    if both.extent(0) is not None:
        monkeypatch.setattr(both, "read", refuse)
    assert [bytes(data) for data in read.all(ORDER, Progress())] == wanted
    # Again, in the same memory, fewer and then more than before.
    assert [bytes(data) for data in read.all(ORDER[:2], Progress())] == wanted[:2]
    assert [bytes(data) for data in read.all(ORDER * 3, Progress())] == wanted * 3
    assert read.all([], Progress()) == []


def test_without_the_library(both: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RegionUnavailableError("no compiler", "install one")

    monkeypatch.setattr(module, "region_library", missing)
    read = BulkRead(both)
    assert read.all(ORDER, Progress()) == [both.read(i) for i in ORDER]


def test_shards_that_are_opened_for_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "DESCRIPTORS_KEPT", 1)
    opened = open_shards([write_tar(tmp_path / f"train-{i}.tar", samples(5)) for i in range(2)])
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = BulkRead(opened).all([0, 7], Progress())
    BulkRead(opened).all([7, 7, 6, 0], Progress())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1  # the one that is kept
    assert [type(data) for data in found] == [memoryview, memoryview]
    assert [bytes(data) for data in found] == [opened.read(0), opened.read(7)]
    opened.close()


@pytest.fixture
def plain(tmp_path: Path):
    path = write_tar(tmp_path / "train-0.tar", samples(5))
    opened = open_shards([path])
    yield opened, path
    opened.close()


def test_a_shard_that_changes_is_found_out(plain: tuple[TarShards, Path]) -> None:
    opened, path = plain
    read = BulkRead(opened)
    read.all([0, 1], Progress())
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"train-0\.tar: was changed or replaced"):
        read.all([0, 1], Progress())


@pytest.mark.parametrize("replaced", [False, True])
def test_and_one_that_vanishes_or_is_replaced(
    plain: tuple[TarShards, Path], monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Looked for once a second: the reader who looks must not hide it from the one who can say it."""
    opened, path = plain
    clock = [100.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: clock[0])
    read = BulkRead(opened)
    read.all([4], Progress())
    path.unlink()
    if replaced:
        path.write_bytes(bytes(5000))
    read.all([4], Progress())  # the descriptor is valid, and the name is not checked yet
    clock[0] += 1.5
    words = "was changed or replaced" if replaced else r"cannot be read \(No such file"
    with pytest.raises(DataError, match=rf"train-0\.tar: {words}"):
        read.all([4], Progress())
