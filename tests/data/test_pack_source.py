from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, DataError
from paceline.data.packing.pack_source import open_splits

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


def test_all_splits_that_are_there(tmp_path: Path, write_tar: Write, samples: Samples) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    assert list(open_splits(str(tmp_path))) == ["train"]
    write_tar(tmp_path / "val-0.tar", samples(2, classes=1))
    found = open_splits(str(tmp_path))
    assert {name: len(source) for name, source in found.items()} == {"train": 6, "val": 2}
    assert found["val"].classes == found["train"].classes
    assert list(open_splits(str(tmp_path), split="val")) == ["val"]


def test_shards_without_a_split_in_their_name(
    tmp_path: Path, write_tar: Write, samples: Samples
) -> None:
    write_tar(tmp_path / "full-0000.tar", samples(6))
    write_tar(tmp_path / "full-0001.tar", samples(2, first=6))
    told: list[str] = []
    assert len(open_splits(str(tmp_path), tell=told.append)["train"]) == 8
    assert told == ["full-0000.tar … tell no split by their names: taken as train"]
    with pytest.raises(DataError, match=r"neither val-\*.tar"):
        open_splits(str(tmp_path), split="val")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        open_splits(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="data.dir is not set"):
        open_splits("")
    with pytest.raises(ConfigError, match="--split = 'test': unknown"):
        open_splits(str(tmp_path), split="test")


def test_the_embedded_set() -> None:
    found = open_splits("", "embedded", "val")
    assert len(found["val"]) == 2000
