from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.small import FileSource, encode, eval_loader, train_loader, write_tar
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    BatchPlan,
    CorruptImage,
    DataSettings,
    open_source,
)
from paceline.data.decode.library import RegionLibrary
from paceline.data.image import decode
from paceline.data.sources import cache
from paceline.data.sources.cache import (
    DiskStore,
    MemoryStore,
    cached,
    from_entry,
    to_entry,
)

LIMIT = 10_000
WRITER = """
import sys
from pathlib import Path
from paceline.data.sources.cache import DiskStore
store = DiskStore(Path(sys.argv[1]), "set", 30_000)
wrong = 0
for i in range(300):
    store.put(i, bytes([i % 256]) * 100)
    found = store.get(i)
    wrong += found is not None and found != bytes([i % 256]) * 100
print(wrong)
"""


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
        made.append(encode(picture.convert(mode), kind, **options))
    return made


def settings(tmp_path: Path, cache: str, form: str = "raw", **more: object) -> DataSettings:
    place = {"cache_dir": str(tmp_path / "cache")} if cache == "disk" else {}
    return DataSettings(cache=cache, cache_form=form, **place, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("form", ["raw", "decoded"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_pixels_as_without(tmp_path: Path, cache: str, form: str, channels: int) -> None:
    plain = FileSource(images())
    chosen = settings(tmp_path, cache, form, channels=channels, mean=[0.5], std=[0.5])
    source = cached(plain, chosen, "train")
    for _ in range(2):
        for i, data in enumerate(plain.files):
            wanted = np.asarray(decode(data, channels))
            assert np.array_equal(np.asarray(decode(source.read(i), channels)), wanted)
    count = len(plain)
    assert plain.reads == list(range(count))
    assert source.counters() == {"cache_hits": count, "cache_misses": count}
    if form == "raw":
        assert source.read(3) == plain.files[3]
    source.close()


@pytest.mark.parametrize("form", ["raw", "decoded"])
def test_corrupt_images_stay_corrupt(tmp_path: Path, form: str) -> None:
    pictures = FileSource([images()[0], b"no image", b""])
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
def test_what_no_longer_fits_is_not_decoded(tmp_path: Path, cache: str) -> None:
    plain = FileSource([encode(np.full((700, 700, 3), i, np.uint8)) for i in range(4)])
    source = cached(plain, settings(tmp_path, cache, "decoded", cache_mib=2), "train")
    for again in range(2):
        found = [source.read(i) for i in range(4)]
        kept = [isinstance(data, np.ndarray) for data in found]
        # The second is the one that finds no room.
        assert kept == [True, not again, False, False]
        assert found[2:] == plain.files[2:]
    source.close()


def jpeg_samples(count: int) -> list[tuple[str, bytes]]:
    """JPEGs of unequal sizes, and all else under their name; one is no image."""
    members = []
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 256, (30 + 3 * i, 60 - 2 * i, 3), np.uint8)
        file = encode(noise[:, :, 0] if i % 5 == 0 else noise, "JPEG")
        members += [(f"{i:03}.jpg", file), (f"{i:03}.cls", b"0")]
    for i, data in enumerate([*images(), b"no image"], start=count):
        members += [(f"{i:03}.jpg", data), (f"{i:03}.cls", b"1")]
    return members


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("channels", [1, 3])
def test_cropped_pixels_are_those_of_cropped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, channels: int
) -> None:
    """The region decoder decodes with and without a cache."""
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
        with train_loader(open_source(chosen, "train"), plan, chosen, seed=1) as loader:
            batches += [(b.images.numpy().copy(), b.labels.tolist()) for b in loader]
            remark, said = loader.note(), loader.describe()
        evaluation = eval_loader(open_source(chosen, "val"), chosen, batch_size=8)
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
        # The corrupt image is counted once, or twice if two threads read it.
        assert remark.split(" of ")[0] in ("1", "2")


def test_a_cache_of_no_use_is_refused() -> None:
    chosen = DataSettings(source="synthetic", cache="memory")
    with pytest.raises(
        ConfigError, match=r"data.cache = 'memory': a cache is useless: the images are in memory"
    ):
        open_source(chosen, "train")
    with pytest.raises(ConfigError, match=r"data.cache_dir = '': data.cache = 'disk' needs a dir"):
        DataSettings(cache="disk")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache/.*: cannot be written"):
        cached(FileSource(images()), settings(tmp_path, "disk"), "train")


def test_no_split_gets_the_other_s_images(tmp_path: Path) -> None:
    """Equal in names, labels, sizes and times, as two splits may be."""
    for split, grey in (("train", 10), ("val", 20)):
        path = tmp_path / "data" / split / "a" / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encode(np.full((4, 4), grey, np.uint8)))
        os.utime(path, (1, 1))
    chosen = settings(tmp_path, "disk", dir=str(tmp_path / "data"))
    for split, grey in (("train", 10), ("val", 20)):
        source = open_source(chosen, split)  # type: ignore[arg-type]
        assert np.asarray(decode(source.read(0), 1))[0, 0] == grey
        source.close()


def test_pixels_are_nothing_for_a_decoder() -> None:
    with pytest.raises(ConfigError, match=r"data.cache_form = 'decoded': .*'raw'"):
        DataSettings(cache="memory", cache_form="decoded", decoder="nvjpeg")
    DataSettings(cache="memory", cache_form="raw", decoder="nvjpeg")
    DataSettings(cache_form="decoded", decoder="nvjpeg")  # nothing is cached


# --- on disk ---------------------------------------------------------------------------------------


def files(directory: Path) -> list[Path]:
    return [p for p in (directory / "set").rglob("*") if p.is_file() and p.parent.name != "set"]


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in files(directory))


def open_store(directory: Path, limit: int = LIMIT) -> DiskStore:
    return DiskStore(directory, "set", limit)


@pytest.mark.parametrize("data", [b"", b"bytes", np.arange(60, dtype=np.uint8).reshape(4, 5, 3)])
def test_entries(data: bytes | np.ndarray) -> None:
    entry = to_entry(7, data)
    found = from_entry(7, entry)
    assert type(found) is type(data)
    assert np.array_equal(found, data) if isinstance(data, np.ndarray) else found == data
    assert from_entry(8, entry) is None
    for length in range(len(entry)):
        assert from_entry(7, entry[:length]) is None
    for at in range(len(entry)):
        assert from_entry(7, entry[:at] + bytes([entry[at] ^ 4]) + entry[at + 1 :]) is None


def test_it_outlives_its_process(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.put(3, b"three")
    first.close()
    second = open_store(tmp_path)
    assert second.get(3) == b"three"
    assert second.get(4) is None
    assert second.used_bytes == size(tmp_path)
    second.close()


def test_the_limit_holds_on_disk_too(tmp_path: Path) -> None:
    entry = len(to_entry(0, bytes(100)))
    store = open_store(tmp_path, 5 * entry)
    for i in range(9):
        store.put(i, bytes(100))
    assert [store.get(i) is not None for i in range(9)] == [True] * 5 + [False] * 4
    assert size(tmp_path) == store.used_bytes == 5 * entry
    store.put(2, bytes(100))  # there already: counted once
    assert store.used_bytes == 5 * entry
    store.close()


def test_a_damaged_file_is_a_miss_and_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(1, b"good")
    path = files(tmp_path)[0]
    for damage in (b"", path.read_bytes()[:-1], b"x" * 40):
        path.write_bytes(damage)
        assert store.get(1) is None
        assert not path.exists()
        store.put(1, b"good")
        assert store.get(1) == b"good"
    assert store.damaged == 3
    store.close()


def test_what_a_killed_run_left_is_corrected(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(1, bytes(500))
    part = files(tmp_path)[0].with_name(".1.77.88.tmp")
    part.write_bytes(bytes(300))
    store._reserve(3000)  # and never written
    other = open_store(tmp_path)  # not alone: the first one may still be writing
    assert other.used_bytes == size(tmp_path) - 300 + 3000
    other.close()
    store.close()
    alone = open_store(tmp_path)
    assert not part.exists()
    assert alone.used_bytes == size(tmp_path)
    alone.close()


def test_a_full_disk_ends_the_caching_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path)
    store.put(0, b"before")
    used = store.used_bytes

    class FullDisk(io.BytesIO):
        def write(self, content: object, /) -> int:
            raise OSError(28, "No space left on device")

    def full(part: Path) -> FullDisk:
        part.touch()
        return FullDisk()

    with monkeypatch.context() as disk:
        disk.setattr(cache, "open_part", full)
        for i in range(1, 5):
            store.put(i, b"more")
    assert store.used_bytes == used
    assert store.get(0) == b"before"
    assert len(files(tmp_path)) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("paceline: warning: the cache adds no more samples: ")
    assert told[0].endswith("cannot be written (No space left on device)")
    store.put(9, b"later")  # no second try: a disk that is full now and then would slow every read
    assert store.get(9) is None
    assert "adds no more" in store.describe()
    store.close()


def test_ranks_of_a_host_share_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(3)
    ]  # fmt: skip
    assert [process.communicate()[0].strip() for process in started] == ["0"] * 3
    entry = len(to_entry(0, bytes(100)))
    assert size(tmp_path) == 30_000 // entry * entry
    store = open_store(tmp_path)
    assert store.used_bytes == size(tmp_path)
    assert not [p for p in files(tmp_path) if p.name.startswith(".")]
    store.close()


@pytest.mark.parametrize("shape", [(4, 5, 1), (0, 5, 3), (2**31, 2**31, 2**31)])
def test_a_shape_that_does_not_fit_under_a_right_checksum(shape: tuple[int, int, int]) -> None:
    pixels = np.arange(60, dtype=np.uint8)
    fields = (7, 60, *shape)
    checksum = cache._checksum(fields, pixels.tobytes())
    entry = cache._HEADER.pack(b"plc1", checksum, *fields) + pixels.tobytes()
    assert from_entry(7, entry) is None
    assert from_entry(7, to_entry(7, b"bytes")) == b"bytes"
