"""Packs: their shards, manifests and images, and what an inspection finds."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.small import MemorySource, encode, samples, write_tar
from paceline.core.errors import DataError
from paceline.data import CorruptImage, DataSettings, PackOptions, inspect_set, open_source
from paceline.data.pack import pack as pack_module
from paceline.data.pack.inspect import inspect_split
from paceline.data.pack.pack import pack_image
from paceline.data.pack.pack import pack_splits as pack
from paceline.data.sources.storage import file_lock
from refusals import refused

pytestmark = pytest.mark.usefixtures("no_leaked_threads")
SHORT = PackOptions(shard_samples=7)
SMALLER = PackOptions(short_side=32)


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix == ".tar"}


def opened(directory: Path, split: str = "train"):
    return open_source(DataSettings(dir=str(directory)), split)  # type: ignore[arg-type]


def test_every_sample_arrives(tmp_path: Path) -> None:
    source = MemorySource(30)
    manifest = pack({"train": source}, tmp_path, SHORT, workers=2)
    assert sorted(contents(tmp_path)) == [f"train-{i:05d}.tar" for i in range(5)]
    record = manifest.splits["train"]
    assert (record.packed, record.copied, record.complete) == (30, 30, True)
    packed = opened(tmp_path)
    assert sorted(packed.labels.tolist()) == list(range(30))
    assert packed.labels.tolist() != list(range(30))  # shuffled
    assert packed.classes == source.classes
    for i in range(30):
        assert packed.read(i) == source.files[packed.labels[i]]
    packed.close()


def test_any_reader_of_tars_understands_them(tmp_path: Path) -> None:
    pack({"train": MemorySource(5)}, tmp_path, PackOptions(shuffle=False))
    with tarfile.open(tmp_path / "train-00000.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members[:4]] == [
            "00000000.png", "00000000.cls", "00000001.png", "00000001.cls",
        ]  # fmt: skip
        assert {(m.mtime, m.uid, m.uname, m.mode) for m in members} == {(0, 0, "", 0o644)}
        label = tar.extractfile(members[3])
        assert label.read() == b"1"


class Interrupt:
    """Ends a pack at its n-th sample."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __call__(self, split: str, done: int, corrupt: int) -> None:
        if done == self.at:
            raise self.error


@pytest.mark.parametrize("at", [1, 7, 10, 21, 30])
def test_an_interrupted_pack_goes_on(tmp_path: Path, at: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sources = {"train": MemorySource(30, {5}), "val": MemorySource(30)}
    options = PackOptions(shard_samples=7, max_corrupt_share=0.1)
    shards = pack(sources, whole, options).splits["train"].shards
    with pytest.raises(KeyboardInterrupt):
        pack(sources, parts, options, workers=2, on_sample=Interrupt(at, KeyboardInterrupt()))
    finished = contents(parts)
    assert sorted(finished) == [shard.name for shard in shards if shard.stop < at]
    assert all(content == contents(whole)[name] for name, content in finished.items())
    assert not list(parts.glob(".*.tmp"))
    times = {name: (parts / name).stat().st_mtime_ns for name in finished}
    pack(sources, parts, options, workers=2)
    assert contents(parts) == contents(whole)
    assert (parts / "pack.json").read_bytes() == (whole / "pack.json").read_bytes()
    assert {name: (parts / name).stat().st_mtime_ns for name in finished} == times


def test_other_options_or_data_are_refused(tmp_path: Path) -> None:
    pack({"train": MemorySource(20)}, tmp_path, SHORT)
    before = contents(tmp_path)
    with pytest.raises(DataError, match="was packed with quality = 90, not 80; repeat"):
        pack({"train": MemorySource(20)}, tmp_path, PackOptions(shard_samples=7, quality=80))
    with pytest.raises(
        DataError,
        match=r"train split in it was packed from other data \(20 samples; the source has",
    ):
        pack({"train": MemorySource(21)}, tmp_path, SHORT)
    with pytest.raises(DataError, match="classes.json: names other classes"):
        pack({"val": MemorySource(3)}, tmp_path, SHORT)
    assert contents(tmp_path) == before


def test_a_split_can_be_added(tmp_path: Path) -> None:
    pack({"train": MemorySource(20)}, tmp_path, SHORT)
    manifest = pack({"val": MemorySource(20)}, tmp_path, SHORT)
    assert set(manifest.splits) == {"train", "val"}
    assert len(opened(tmp_path, "val")) == 20


def test_only_our_own_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"is not empty \(thesis.tex\)"):
        pack({"train": MemorySource(3)}, tmp_path, SHORT)
    with pytest.raises(DataError, match="is a file, not a directory"):
        pack({"train": MemorySource(3)}, tmp_path / "thesis.tex", SHORT)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_packs_at_once(tmp_path: Path) -> None:
    with file_lock(tmp_path / ".pack.lock") as held:
        assert held
        with pytest.raises(DataError, match="another paceline pack is writing to it"):
            pack({"train": MemorySource(3)}, tmp_path, SHORT)


def test_corrupt_images_are_named_and_left_out(tmp_path: Path) -> None:
    source = MemorySource(30, {4, 9})
    manifest = pack({"train": source}, tmp_path, PackOptions(max_corrupt_share=0.1))
    record = manifest.splits["train"]
    assert record.packed == 28
    assert sorted((s.index, s.name) for s in record.corrupt) == [(4, "memory:4"), (9, "memory:9")]
    assert "not a JPEG" in record.corrupt[0].reason
    assert sorted(opened(tmp_path).labels.tolist()) == sorted(set(range(30)) - {4, 9})


def test_too_many_corrupt_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 corrupt of 30 images in train \(allowed: 1\)"):
        pack({"train": MemorySource(30, {4, 9})}, tmp_path, PackOptions())
    with pytest.raises(DataError, match=r"train split: no image can be decoded"):
        pack({"train": MemorySource(1, {0})}, tmp_path / "one", PackOptions())
    assert not contents(tmp_path / "one")


def test_corrupt_images_at_the_very_end_make_no_shard(tmp_path: Path) -> None:
    options = PackOptions(shard_samples=3, shuffle=False, max_corrupt_share=0.4)
    manifest = pack({"train": MemorySource(5, {3, 4})}, tmp_path, options)
    assert list(contents(tmp_path)) == ["train-00000.tar"]
    assert len(manifest.splits["train"].corrupt) == 2
    assert pack({"train": MemorySource(5, {3, 4})}, tmp_path, options).splits["train"].complete


def test_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    written = []

    class FullDisk(pack_module.ShardWriter):
        def _write(self, content: bytes) -> None:
            written.append(len(content))
            if sum(written) > 25_000:
                raise OSError(28, "No space left on device")
            super()._write(content)

    monkeypatch.setattr(pack_module, "ShardWriter", FullDisk)
    with pytest.raises(
        DataError, match=r"train-00001.tar: cannot be written \(No space left .*free"
    ):
        pack({"train": MemorySource(20)}, tmp_path, SHORT, workers=1)
    assert list(contents(tmp_path)) == ["train-00000.tar"]
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.undo()
    assert pack({"train": MemorySource(20)}, tmp_path, SHORT).splits["train"].packed == 20


def test_a_damaged_manifest(tmp_path: Path) -> None:
    pack({"train": MemorySource(5)}, tmp_path, SHORT)
    good = (tmp_path / "pack.json").read_text()
    for content, line in (
        ("{", "is not a manifest of paceline pack"),
        ("[]", "is not a manifest of paceline pack"),
        (good.replace('"version": 1', '"version": 9'), "version 9, but this Paceline reads only 1"),
        (good.replace("train-00000.tar", "../../etc/passwd"), "is not a manifest"),
        (good.replace('"samples"', '"simples"'), "is not a manifest"),
    ):
        (tmp_path / "pack.json").write_text(content)
        with pytest.raises(DataError, match=line):
            pack({"train": MemorySource(5)}, tmp_path, SHORT)


def test_names_of_the_source_never_become_paths(tmp_path: Path) -> None:
    image = samples(1)[0][1]
    evil = [("../../evil.png", image), ("../../evil.cls", b"0"),
            ("/etc/evil2.png", image), ("/etc/evil2.cls", b"1")]  # fmt: skip
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "train-0.tar", evil)
    before = sorted(p for p in tmp_path.rglob("*"))
    pack({"train": opened(tmp_path / "in")}, tmp_path / "out", PackOptions())
    new = sorted(set(tmp_path.rglob("*")) - set(before) - {tmp_path / "out"})
    assert all(path.parent == tmp_path / "out" for path in new)
    with tarfile.open(tmp_path / "out" / "train-00000.tar") as tar:
        assert sorted(tar.getnames()) == ["00000000.cls", "00000000.png",
                                          "00000001.cls", "00000001.png"]  # fmt: skip


def test_half_a_pack_is_no_training_data(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack({"train": MemorySource(20)}, tmp_path, SHORT,
             on_sample=Interrupt(10, KeyboardInterrupt()))  # fmt: skip
    with pytest.raises(DataError, match=r"train is packed up to 7 of 20 samples; repeat the pack"):
        opened(tmp_path)
    pack({"train": MemorySource(20)}, tmp_path, SHORT)
    opened(tmp_path).close()
    shard = tmp_path / "train-00001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content + bytes(512))
    with pytest.raises(DataError, match=r"train-00001\.tar: has \d+ bytes, not \d+"):
        opened(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001\.tar: is missing \(see pack\.json"):
        opened(tmp_path)


def test_without_locks_nothing_of_another_pack_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "file_lock", lambda path, wait: nullcontext(None))
    part = tmp_path / ".train-00000.tar.0123456789abcdef.tmp"
    part.write_bytes(b"somebody is writing this")
    told: list[str] = []
    pack({"train": MemorySource(5)}, tmp_path, SHORT, on_note=told.append)
    assert part.exists()
    assert len(told) == 1
    assert told[0].endswith("has no locks: make sure that no other pack writes there")


def test_sweeping_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".train-00000.tar.0123456789abcdef.tmp").symlink_to(victim)
    pack({"train": MemorySource(5)}, tmp_path / "out", SHORT)
    assert victim.read_bytes() == b"precious"
    assert not list((tmp_path / "out").glob(".*.tmp"))


# --- one image -------------------------------------------------------------------------------------


def photo(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Smooth, so that JPEG and scaling change it little."""
    rows, columns = np.mgrid[0:height, 0:width]
    values = np.stack([rows * 3, columns * 2, rows + columns], axis=2).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def file_of(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    return encode(image, kind, **options)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_small_images_are_copied_byte_for_byte(kind: str) -> None:
    data = file_of(photo(), kind)
    packed = pack_image(data, PackOptions(short_side=40))
    assert packed.content is data
    assert packed.copied
    assert packed.extension == {"JPEG": "jpg"}.get(kind, kind.lower())


@pytest.mark.parametrize(
    ("kind", "mode", "kept"),
    [("JPEG", "RGB", "RGB"), ("JPEG", "L", "L"), ("JPEG", "CMYK", "RGB"), ("PNG", "RGBA", "RGB"),
     ("PNG", "P", "RGB"), ("PNG", "LA", "L"), ("PNG", "I;16", "L"), ("PNG", "1", "L"),
     ("WEBP", "RGB", "RGB")],
)  # fmt: skip
def test_large_ones_are_scaled_in_their_own_format(kind: str, mode: str, kept: str) -> None:
    packed = pack_image(file_of(photo(mode=mode), kind), SMALLER)
    assert not packed.copied
    with Image.open(io.BytesIO(packed.content)) as image:
        assert (image.format, image.mode, image.size) == (kind, kept, (48, 32))


def test_quality_and_format() -> None:
    data = file_of(photo(600, 400), "PNG")
    low, high = (
        pack_image(data, PackOptions(short_side=200, format="jpeg", quality=q)) for q in (30, 95)
    )
    assert low.extension == high.extension == "jpg"
    assert len(low.content) < len(high.content)
    # Another format is another file, however small the image.
    assert not pack_image(file_of(photo(8, 8), "PNG"), PackOptions(format="jpeg")).copied
    assert pack_image(file_of(photo(8, 8)), PackOptions(format="jpeg")).copied


def test_pixels_and_foreign_formats_become_png() -> None:
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    packed = pack_image(pixels, PackOptions())
    assert packed.extension == "png"
    with Image.open(io.BytesIO(packed.content)) as image:
        assert np.array_equal(np.asarray(image), pixels)
    grey = pack_image(pixels[:, :, :1], PackOptions())
    with Image.open(io.BytesIO(grey.content)) as image:
        assert image.mode == "L"
    assert pack_image(file_of(photo(8, 8), "BMP"), PackOptions()).extension == "png"


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_what_cannot_be_decoded_is_not_copied_either(damage: str) -> None:
    data = file_of(photo())
    data = {"cut": data[: len(data) // 2], "empty": b"", "text": b"hello"}[damage]
    with pytest.raises(CorruptImage):
        pack_image(data, PackOptions())


def test_a_side_that_the_format_cannot_hold() -> None:
    wide = Image.new("L", (20_000, 2))
    with pytest.raises(CorruptImage, match="cannot be written as WEBP"):
        pack_image(file_of(wide, "PNG"), PackOptions(format="webp"))


def test_a_camera_s_jpeg_with_two_pictures_stays_a_jpeg() -> None:
    data = file_of(photo(), "MPO", save_all=True, append_images=[photo(30, 20)])
    with Image.open(io.BytesIO(data)) as found:
        assert found.format == "MPO"
    packed = pack_image(data, PackOptions())
    assert (packed.extension, packed.content, packed.copied) == ("jpg", data, True)
    scaled = pack_image(data, PackOptions(short_side=10))
    with Image.open(io.BytesIO(scaled.content)) as found:
        assert (scaled.extension, found.format) == ("jpg", "JPEG")


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"format": "jpg"}, {"filter": "cubic"}, {"short_side": -1}, {"quality": 0}, {"quality": 101},
        {"shard_mib": 0}, {"shard_samples": -3}, {"max_corrupt_share": 1.0},
    ],
)  # fmt: skip
def test_wrong_values_are_named(change: dict[str, Any]) -> None:
    with refused(f"--{next(iter(change))}".replace("_", "-")):
        PackOptions(**change)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack({"train": MemorySource(20)}, tmp_path / "set", PackOptions(shard_samples=7))
    return tmp_path / "set"


def problems(directory: Path, **options: object) -> list[str]:
    return inspect_set(str(directory), **options).problems  # type: ignore[arg-type]


def test_nothing_wrong(packed: Path) -> None:
    report = inspect_set(str(packed), look_at=None, workers=2)
    assert report.problems == []
    facts = report.table()["splits"]["train"]  # type: ignore[index]
    assert facts["samples"] == facts["classes"] == facts["looked_at"] == 20
    assert facts["samples_per_class"] == {"min": 1, "median": 1.0, "max": 1}
    assert facts["formats"] == {"PNG": 20}
    assert facts["modes"] == {"L": 20}
    assert facts["width"] == facts["height"] == {"min": 8, "median": 8.0, "max": 8}
    assert facts["bytes_are"] == "counted"


def test_a_flipped_bit(packed: Path) -> None:
    path = packed / "train-00001.tar"
    content = bytearray(path.read_bytes())
    content[530] ^= 1  # inside of an image
    path.write_bytes(content)
    assert any("train-00001.tar: its SHA-256" in line for line in problems(packed))
    assert not any("SHA-256" in line for line in problems(packed, checksums=False))


def test_missing_and_surplus_shards(packed: Path) -> None:
    (packed / "train-00001.tar").rename(packed / "train-00009.tar")
    found = problems(packed)
    assert any("train-00001.tar: is missing, the manifest has it" in line for line in found)
    assert any("train-00009.tar: is not in the manifest" in line for line in found)


def test_a_pack_that_was_interrupted(tmp_path: Path) -> None:
    def stop(split: str, done: int, corrupt: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack({"train": MemorySource(20)}, tmp_path, PackOptions(shard_samples=7), on_sample=stop)
    assert any("train is packed up to 7 of 20 samples" in line for line in problems(tmp_path))


def test_sampling_is_the_same_every_time() -> None:
    source = MemorySource(500)
    assert inspect_split(source, 40, 0).looked_at == 40
    first, source.reads = sorted(source.reads), []
    inspect_split(source, 40, 3)
    assert sorted(source.reads) == first
    assert len(set(first)) == 40
    assert inspect_split(source, 10_000, 2).looked_at == 500


def test_a_damaged_manifest_is_one_problem_among_others(packed: Path) -> None:
    (packed / "pack.json").write_text("{")
    os.truncate(packed / "train-00001.tar", 3000)
    found = problems(packed)
    assert any("train-00001.tar: not a readable tar shard" in line for line in found)
    assert sum("pack.json: is not a manifest of paceline pack" in line for line in found) == 1
