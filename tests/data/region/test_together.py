"""Samples by a few calls are those of single calls: pixels, labels, corrupt samples, counts."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.batch_plan import BatchPlan
from paceline.data.cause_clock import CauseClock
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.region import together as module
from paceline.data.region.library import RegionLibrary
from paceline.data.region.preparer import RegionPreparer
from paceline.data.settings import DataSettings
from paceline.data.sources.tar_shards import TarShards

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
COUNT = 37


class OneByOne:
    """A source that does not say where its files lie."""

    def __init__(self, inner: TarShards) -> None:
        self._inner = inner
        self.labels, self.classes = inner.labels, inner.classes
        self.read, self.name, self.close = inner.read, inner.name, inner.close

    def __len__(self) -> int:
        return len(self._inner)


def image(i: int) -> bytes:
    """4 is a PNG, 9 CMYK, 14 cut short, 19 no image at all, 24 very tall, 29 grey."""
    draw = np.random.default_rng(i)
    height, width = (1500, 12) if i == 24 else (40 + 5 * i, 90 - i)
    noise = Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    picture = noise.resize((width, height), Image.Resampling.BICUBIC)
    picture = picture.convert({9: "CMYK", 29: "L"}.get(i, "RGB"))
    stream = io.BytesIO()
    picture.save(stream, "PNG" if i == 4 else "JPEG", quality=90, progressive=i % 5 == 0)
    data = stream.getvalue()
    return {14: data[: len(data) // 2], 19: b"words, not pixels"}.get(i, data)


@pytest.fixture
def shards(tmp_path: Path, write_tar: Write, library: RegionLibrary):
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
    opened = TarShards(paths)
    yield opened
    opened.close()


def settings(**changes: Any) -> DataSettings:
    usual = {
        "image_size": 24, "eval_resize": 28, "decoder": "region", "max_corrupt_share": 0.2,
        "resident": "off",
    }  # fmt: skip
    return DataSettings(**{**usual, **changes})


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"cutout": 6, "interpolation": "bicubic"}, {"augment": "pad_crop"}]
)
def test_training_batches_are_those_of_single_calls(
    shards: TarShards, workers: int, changes: dict[str, Any]
) -> None:
    plan = BatchPlan(COUNT, 3, 36, 36, 1)
    asked = settings(workers=workers, **changes)
    loaders = [
        TrainLoader(source, plan, asked, seed=7, rank=0) for source in (shards, OneByOne(shards))
    ]
    with loaders[0] as got, loaders[1] as wanted:
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)
            assert one.corrupt == other.corrupt
        assert {sample.index for sample in got.corrupt} == {14, 19}
        assert got.corrupt == wanted.corrupt
        assert "went to Pillow" in got.remark()
        if workers < 2:  # two threads may both meet a corrupt file before either has noted it
            assert got.remark() == wanted.remark()


def test_so_are_those_of_evaluation(shards: TarShards) -> None:
    loaders = [
        EvalLoader(source, settings(workers=2), rank=0, world_size=1, batch_size=36)
        for source in (shards, OneByOne(shards))
    ]
    with loaders[0] as got, loaders[1] as wanted:
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)
            assert one.corrupt == other.corrupt


def test_most_samples_really_go_that_way(
    shards: TarShards, library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = TrainLoader(shards, BatchPlan(COUNT, 1, 9, 9, 1), settings(), seed=0, rank=0)
    fill = transform._prepare.together(shards)
    assert fill is not None
    clock, checks = CauseClock(), []
    outs = np.zeros((COUNT, 24, 24, 3), dtype=np.uint8)
    rows = [[0.5] * transform._prepare.draws] * COUNT
    done = fill(range(COUNT), rows, list(outs), lambda: checks.append(1), clock)
    assert [i for i in range(COUNT) if not done[i]] == [4, 9, 14, 19, 24]
    assert len(checks) == -(-COUNT // module._AT_ONCE)
    assert set(clock.take()) == {"read", "decode", "augment"}
    transform.close()


def test_there_is_no_such_way_without_places(shards: TarShards, library: RegionLibrary) -> None:
    from paceline.data.augmentation.augment import FitTransform

    prepare = RegionPreparer(FitTransform(8, 8, "bilinear"), 3, library)
    assert prepare.together(OneByOne(shards)) is None


def test_a_closed_loader_is_gone_at_once(shards: TarShards) -> None:
    """Not at some garbage collection: what it holds on a GPU must not go at just any moment."""
    gc.collect()
    gc.disable()
    try:
        for workers in (0, 2):
            loaders = [
                TrainLoader(shards, BatchPlan(COUNT, 2, 9, 9, 1), settings(workers=workers), seed=7,
                            rank=0),
                EvalLoader(shards, settings(workers=workers), rank=0, world_size=1, batch_size=9),
            ]  # fmt: skip
            next(loaders[0])
            next(iter(loaders[1]))
            held = [weakref.ref(loader) for loader in loaders]
            for loader in loaders:
                loader.close()
            del loader, loaders
            assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_a_shard_that_is_cut_has_the_usual_words(shards: TarShards, tmp_path: Path) -> None:
    plan = BatchPlan(COUNT, 1, 36, 36, 1)
    with TrainLoader(shards, plan, settings(workers=2), seed=7, rank=0) as loader:
        path = tmp_path / "train-1.tar"
        path.write_bytes(path.read_bytes()[:2048])
        with pytest.raises(DataError, match=r"train-1\.tar: (ends at byte|has changed)"):
            next(loader)
