from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data import PackOptions, inspect_set
from paceline.data.pack.inspect import contact_sheet, inspect_split
from paceline.data.pack.pack import pack_splits as pack
from paceline.data.sources.index_store import index_path, write_index
from paceline.data.sources.storage import ShardStamp
from paceline.data.sources.tar_index import scan_shard


@pytest.fixture
def packed(tmp_path: Path, memory_source: type) -> Path:
    pack({"train": memory_source(20)}, tmp_path / "set", PackOptions(shard_samples=7))
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
    assert any("train-00001.tar: SHA-256" in line for line in problems(packed))
    assert not any("SHA-256" in line for line in problems(packed, checksums=False))


def test_missing_and_surplus_shards(packed: Path) -> None:
    (packed / "train-00001.tar").rename(packed / "train-00009.tar")
    found = problems(packed)
    assert any("train-00001.tar: is missing, the manifest has it" in line for line in found)
    assert any("train-00009.tar: is not in the manifest" in line for line in found)


def test_an_index_that_lies(packed: Path) -> None:
    path = packed / "train-00000.tar"
    with (packed / "train-00001.tar").open("rb") as content:
        index = scan_shard(path, content)
    write_index(index_path(path), index, ShardStamp.of(path))
    assert any(
        "train-00000.tar.index: says otherwise than its shard" in p for p in problems(packed)
    )
    os.utime(path, (1, 1))  # a stale one is never used, and no problem
    assert problems(packed) == []


def test_a_pack_that_was_interrupted(tmp_path: Path, memory_source: type) -> None:
    def stop(split: str, done: int, corrupt: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack({"train": memory_source(20)}, tmp_path, PackOptions(shard_samples=7), on_sample=stop)
    assert any("train is packed up to 7 of 20 samples" in line for line in problems(tmp_path))


def test_the_size_of_every_file_is_checked(
    tmp_path: Path, write_tar: Callable[[Path, list[tuple[str, bytes]]], Path]
) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "b").mkdir()
    for i in range(40):
        Image.new("L", (4, 4)).save(tmp_path / "train" / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    (tmp_path / "train" / "b" / "1.png").unlink()
    (tmp_path / "train" / "b" / "1.png").symlink_to("nowhere")
    (tmp_path / "train" / "b" / "x.tif").write_bytes(b"II*\0")
    report = inspect_set(str(tmp_path), look_at=2)
    assert any("a/0.png (empty file)" in line for line in report.problems)
    assert any("b/1.png (" in line for line in report.problems)
    assert len(report.problems) == 2
    assert any("1 .tif" in note for note in report.notes)
    facts = report.table()["splits"]["train"]  # type: ignore[index]
    there = [path.stat().st_size for path in tmp_path.glob("train/*/*.png") if path.exists()]
    assert (facts["bytes"], facts["bytes_are"]) == (sum(there), "counted")
    image = (tmp_path / "train" / "a" / "2.png").read_bytes()
    members = [("a.jpg", b""), ("a.cls", b"0")]
    for i in range(30):
        members += [(f"{i}.jpg", image), (f"{i}.cls", b"0")]
    write_tar(tmp_path / "train-0.tar", members)
    found = problems(tmp_path, kind="shards", look_at=2)
    assert found == ["train: corrupt: train-0.tar:a.jpg (empty file)"]


def test_sampling_is_the_same_every_time(memory_source: type) -> None:
    source = memory_source(500)
    assert inspect_split(source, 40, 0).looked_at == 40
    first, source.reads = sorted(source.reads), []
    inspect_split(source, 40, 3)
    assert sorted(source.reads) == first
    assert len(set(first)) == 40
    assert inspect_split(source, 10_000, 2).looked_at == 500


@pytest.mark.parametrize("count", [1, 7, 23])
def test_contact_sheet(memory_source: type, count: int) -> None:
    source = memory_source(count, corrupt={0})
    source.classes = ["猫" * 30] * count
    with Image.open(io.BytesIO(contact_sheet(source, 100))) as sheet:
        pixels = np.asarray(sheet)
        assert sheet.width == min(count, 10) * 116 + 4
        assert sheet.height == -(-count // 10) * 132 + 4
    assert pixels[60, 60].tolist() == [200, 30, 30]  # the corrupt one is red
    if count > 1:
        assert pixels[60, 116 + 60].tolist() == [1, 1, 1]


def test_the_sheet_is_written(packed: Path, tmp_path: Path) -> None:
    inspect_set(str(packed), sheet=(tmp_path / "sheet.png", 5))
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 5 * 116 + 4


def test_a_damaged_manifest_is_one_problem_among_others(packed: Path) -> None:
    (packed / "pack.json").write_text("{")
    os.truncate(packed / "train-00001.tar", 3000)
    found = problems(packed)
    assert any("train-00001.tar: not a readable tar shard" in line for line in found)
    assert sum("pack.json: is no manifest of a pack" in line for line in found) == 1
