from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import ConfigError, DataError
from paceline.data.batch_plan import BatchPlan
from paceline.data.caching.cache import CachedSource, cached
from paceline.data.caching.cache_store import MemoryStore
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.region.library import RegionLibrary
from paceline.data.settings import DataSettings
from paceline.data.sources.source import open_source
from paceline.data.sources.source_protocol import shard_sizes, source_counters, source_kind

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


def images() -> list[bytes]:
    """One of each kind that decoding has to deal with."""
    picture = Image.effect_noise((40, 30), 80).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for kind, mode, options in (
        ("JPEG", "RGB", {}), ("JPEG", "L", {}), ("JPEG", "CMYK", {}), ("PNG", "P", {}),
        ("PNG", "RGBA", {}), ("WEBP", "RGB", {}), ("JPEG", "RGB", {"exif": exif}),
    ):  # fmt: skip
        stream = io.BytesIO()
        picture.convert(mode).save(stream, kind, **options)
        made.append(stream.getvalue())
    return made


class Pictures:
    def __init__(self, data: list[bytes]) -> None:
        self.data = data
        self.classes = ["a"]
        self.labels = np.zeros(len(data), dtype=np.int64)
        self.groups = [len(data)]
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def read(self, i: int) -> bytes:
        self.reads.append(i)
        return self.data[i]

    def name(self, i: int) -> str:
        return f"picture:{i}"

    def close(self) -> None:
        pass


def settings(tmp_path: Path, cache: str, form: str = "raw", **more: object) -> DataSettings:
    place = {"cache_dir": str(tmp_path / "cache")} if cache == "disk" else {}
    return DataSettings(cache=cache, cache_form=form, **place, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("form", ["raw", "decoded"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_pixels_as_without(tmp_path: Path, cache: str, form: str, channels: int) -> None:
    plain = Pictures(images())
    chosen = settings(tmp_path, cache, form, channels=channels, mean=[0.5], std=[0.5])
    source = cached(plain, chosen, "train")
    for _ in range(2):
        for i, data in enumerate(plain.data):
            wanted = np.asarray(decode(data, channels))
            assert np.array_equal(np.asarray(decode(source.read(i), channels)), wanted)
    count = len(plain)
    assert plain.reads == list(range(count))
    assert source_counters(source) == {"cache_hits": count, "cache_misses": count}
    if form == "raw":
        assert source.read(3) == plain.data[3]
    source.close()


@pytest.mark.parametrize("form", ["raw", "decoded"])
def test_corrupt_images_stay_corrupt(tmp_path: Path, form: str) -> None:
    pictures = Pictures([images()[0], b"no image", b""])
    source = cached(pictures, settings(tmp_path, "memory", form), "train")
    for _ in range(2):
        for i in (1, 2):
            with pytest.raises(CorruptImage):
                decode(source.read(i), 3)


def test_the_limit_holds_to_the_byte() -> None:
    store = MemoryStore(1000)
    for i in range(30):
        store.put(i, bytes(99))
    assert store.used_bytes == 990
    store.put(40, bytes(11))
    assert store.get(40) is None
    store.put(41, np.zeros((5, 2, 1), np.uint8))
    assert store.used_bytes == 1000
    assert store.get(41) is not None
    # What is there stays: a cache that swaps would miss in every epoch.
    assert store.get(0) == bytes(99)
    store.put(0, bytes(1))
    assert store.get(0) == bytes(99)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_what_no_longer_fits_is_not_decoded(
    tmp_path: Path, png: Callable[..., bytes], cache: str
) -> None:
    plain = Pictures([png(np.full((700, 700, 3), i, np.uint8)) for i in range(4)])
    source = cached(plain, settings(tmp_path, cache, "decoded", cache_mib=2), "train")
    for again in range(2):
        found = [source.read(i) for i in range(4)]
        kept = [isinstance(data, np.ndarray) for data in found]
        # The second is the one that finds no room.
        assert kept == [True, not again, False, False]
        assert found[2:] == plain.data[2:]
    source.close()


def test_what_is_kept_is_not_part_of_something_larger() -> None:
    store = MemoryStore(1000)
    batch = np.zeros((100, 4, 4, 3), np.uint8)
    store.put(0, batch[7])
    batch[7] = 9
    kept = store.get(0)
    assert isinstance(kept, np.ndarray)
    assert kept.max() == 0
    assert kept.base is None


def test_it_passes_on_what_the_source_is(tmp_path: Path) -> None:
    plain = Pictures(images())
    source = cached(plain, settings(tmp_path, "memory"), "train")
    assert isinstance(source, CachedSource)
    assert (len(source), source.name(2), list(source.classes)) == (7, "picture:2", ["a"])
    assert shard_sizes(source) == [7]
    assert source_kind(source) == "Pictures"
    assert source.remark == "raw cache in memory, at most 4096 MiB"
    source.read(0)
    assert source.remark.endswith("0 of 1 reads from it")


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("form", ["raw", "decoded"])
def test_training_sees_the_same_batches(
    tmp_path: Path,
    write_tar: Write,
    samples: Samples,
    small_settings: Callable[..., DataSettings],
    cache: str,
    form: str,
) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "train-0.tar", [*samples(20), ("x.png", b"bad"), ("x.cls", b"1")])
    plan = BatchPlan(21, 3, 8, 4, 1)
    seen = []
    for name in ("none", cache):
        place = {"cache_dir": str(tmp_path / "cache")} if name == "disk" else {}
        chosen = small_settings(
            dir=str(tmp_path / "data"), cache=name, cache_form=form, workers=2, augment="pad_crop",
            max_corrupt_share=0.1, **place,
        )  # fmt: skip
        with TrainLoader(open_source(chosen, "train"), plan, chosen, seed=1, rank=0) as loader:
            seen.append([(b.images.numpy().copy(), b.labels.tolist()) for b in loader])
    for (images_a, labels_a), (images_b, labels_b) in zip(*seen, strict=True):
        assert np.array_equal(images_a, images_b)
        assert labels_a == labels_b


def jpeg_samples(count: int) -> list[tuple[str, bytes]]:
    """JPEGs of unequal sizes, and all else under their name; one is no image."""
    members = []
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 256, (30 + 3 * i, 60 - 2 * i, 3), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noise[:, :, 0] if i % 5 == 0 else noise).save(stream, "JPEG")
        members += [(f"{i:03}.jpg", stream.getvalue()), (f"{i:03}.cls", b"0")]
    for i, data in enumerate([*images(), b"no image"], start=count):
        members += [(f"{i:03}.jpg", data), (f"{i:03}.cls", b"1")]
    return members


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("channels", [1, 3])
def test_cropped_pixels_are_those_of_cropped_files(
    tmp_path: Path, write_tar: Write, monkeypatch: pytest.MonkeyPatch, cache: str, channels: int
) -> None:
    """Both by the region decoder where there is one: a cache is no reason to go to Pillow."""
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}-0.tar", jpeg_samples(16))
    squares: list[bool] = []
    square = RegionLibrary.square

    def noted(*given: Any) -> bool:
        squares.append(square(*given))
        return squares[-1]

    monkeypatch.setattr(RegionLibrary, "square", noted)
    seen = []
    for name in ("none", cache):
        squares.clear()  # the library's own check fills some
        chosen = settings(
            tmp_path, name, "decoded", dir=str(tmp_path), image_size=16, eval_resize=20,
            channels=channels, mean=[0.5], std=[0.5], workers=2, max_corrupt_share=0.1,
        )  # fmt: skip
        plan, batches = BatchPlan(24, 3, 8, 8, 1), []
        with TrainLoader(open_source(chosen, "train"), plan, chosen, seed=1, rank=0) as loader:
            batches += [(b.images.numpy().copy(), b.labels.tolist()) for b in loader]
            remark, said = loader.remark(), loader.describe()
        evaluation = EvalLoader(
            open_source(chosen, "val"), chosen, rank=0, world_size=1, batch_size=8
        )
        with evaluation:
            for _ in range(2):
                batches += [(b.images.numpy().copy(), b.labels.tolist()) for b in evaluation]
        seen.append(batches)
    for (images_a, labels_a), (images_b, labels_b) in zip(*seen, strict=True):
        assert np.array_equal(images_a, images_b)
        assert labels_a == labels_b
    if "region decoder, " in said:
        assert len(squares) > 100
        assert all(squares)
        # The one that is no image, once or, where two threads meet it, twice.
        assert remark.split(" of ")[0] in ("1", "2")


def test_a_cache_of_no_use_is_refused() -> None:
    chosen = DataSettings(source="synthetic", cache="memory")
    with pytest.raises(ConfigError, match=r"data.cache = 'memory': these images are in memory"):
        open_source(chosen, "train")
    with pytest.raises(ConfigError, match=r"data.cache_dir = '': data.cache = 'disk' needs a dir"):
        DataSettings(cache="disk")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache/.*: cannot be written"):
        cached(Pictures(images()), settings(tmp_path, "disk"), "train")


def test_no_split_gets_the_other_s_images(tmp_path: Path, png: Callable[..., bytes]) -> None:
    """Equal in names, labels, sizes and times, as two splits may be."""
    for split, grey in (("train", 10), ("val", 20)):
        path = tmp_path / "data" / split / "a" / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(png(np.full((4, 4), grey, np.uint8)))
        os.utime(path, (1, 1))
    chosen = settings(tmp_path, "disk", dir=str(tmp_path / "data"))
    for split, grey in (("train", 10), ("val", 20)):
        source = open_source(chosen, split)  # type: ignore[arg-type]
        assert np.asarray(decode(source.read(0), 1))[0, 0] == grey
        source.close()


def test_a_changed_file_is_read_anew(tmp_path: Path, png: Callable[..., bytes]) -> None:
    path = tmp_path / "data" / "train" / "a" / "1.png"
    path.parent.mkdir(parents=True)
    chosen = settings(tmp_path, "disk", dir=str(tmp_path / "data"))
    for grey in (10, 20):
        path.write_bytes(png(np.full((4, 4), grey, np.uint8)))
        os.utime(path, (grey, grey))
        source = open_source(chosen, "train")
        assert np.asarray(decode(source.read(0), 1))[0, 0] == grey
        source.close()


@pytest.mark.parametrize("decoder", ["nvjpeg", "dali"])
def test_pixels_are_nothing_for_a_decoder(decoder: str) -> None:
    with pytest.raises(ConfigError, match=r"data.cache_form = 'decoded': .*'raw'"):
        DataSettings(cache="memory", cache_form="decoded", decoder=decoder)
    DataSettings(cache="memory", cache_form="raw", decoder=decoder)
    DataSettings(cache_form="decoded", decoder=decoder)  # nothing is cached
