from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.data import PackOptions, inspect_set
from paceline.data.pack.inspect import inspect_split
from paceline.data.pack.pack import pack_splits as pack


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


def test_a_pack_that_was_interrupted(tmp_path: Path, memory_source: type) -> None:
    def stop(split: str, done: int, corrupt: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack({"train": memory_source(20)}, tmp_path, PackOptions(shard_samples=7), on_sample=stop)
    assert any("train is packed up to 7 of 20 samples" in line for line in problems(tmp_path))


def test_sampling_is_the_same_every_time(memory_source: type) -> None:
    source = memory_source(500)
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
    assert sum("pack.json: is not a manifest of a pack" in line for line in found) == 1
