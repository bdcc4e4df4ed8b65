from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigError, DataError
from paceline.data import DataSettings, open_source, open_splits

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
Samples = Callable[..., list[tuple[str, bytes]]]


def settings(directory: Path, source: str = "auto") -> DataSettings:
    return DataSettings(dir=str(directory), source=source)


def test_the_embedded_set_is_taken_only_where_it_is_named() -> None:
    source = open_source(DataSettings(source="embedded"), "val")
    assert source.kind == "TarShards"
    assert len(source) == 2000
    with pytest.raises(DataError, match="data.dir is not set; --data-dir takes"):
        open_source(DataSettings(), "val")


def test_shards_are_found(tmp_path: Path, write_tar: Write, samples: Samples) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    write_tar(tmp_path / "train-1.tar.gz", samples(3, first=6))
    write_tar(tmp_path / "val-0.tgz", samples(2))
    (tmp_path / "train-2.tar.part").write_bytes(b"half a download")
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b", "c", "d"]))
    train, val = (open_source(settings(tmp_path), split) for split in ("train", "val"))
    assert train.kind == "TarShards"
    assert (len(train), len(val)) == (9, 2)
    assert train.classes == val.classes == ["a", "b", "c", "d"]
    assert len(open_source(settings(tmp_path, "shards"), "train")) == 9


def test_training_classes_hold_for_validation(
    tmp_path: Path, write_tar: Write, samples: Samples
) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6, classes=3))
    write_tar(tmp_path / "val-0.tar", samples(4, classes=2))
    train = open_source(settings(tmp_path), "train")
    assert open_source(settings(tmp_path), "val", train.classes).classes == ["0", "1", "2"]
    write_tar(tmp_path / "val-0.tar", samples(8, classes=5))
    with pytest.raises(DataError, match="label 3 is outside the 3 classes"):
        open_source(settings(tmp_path), "val", train.classes)


def make_folder(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "1.jpg").write_bytes(b"")


def test_folders_are_found_and_validation_counts_as_training_does(tmp_path: Path) -> None:
    make_folder(tmp_path, "train/a", "train/b", "train/c", "val/c")
    train, val = (open_source(settings(tmp_path), split) for split in ("train", "val"))
    assert train.kind == "ImageFolder"
    assert val.classes == ["a", "b", "c"]
    assert val.labels.tolist() == [2]


def test_a_directory_that_is_missing_empty_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, problem in (
        ("absent", "absent: no such directory; --data-dir takes"),
        ("empty", "is empty; --data-dir takes"),
        ("file", "is a file, not a directory"),
    ):
        for source in ("auto", "shards"):
            with pytest.raises(DataError, match=problem):
                open_source(settings(tmp_path / name, source), "train")


@pytest.mark.parametrize(
    ("source", "looked_for"),
    [
        ("auto", r"neither val-\*.tar\[.gz\] nor val/<class>/"),
        ("shards", r"no val-\*.tar"),
        ("folder", r"no val/<class>/"),
    ],
)
def test_missing_split(
    tmp_path: Path, write_tar: Write, samples: Samples, source: str, looked_for: str
) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    with pytest.raises(DataError, match=looked_for):
        open_source(settings(tmp_path, source), "val")


def test_both_layouts_at_once(tmp_path: Path, write_tar: Write, samples: Samples) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    make_folder(tmp_path, "train/a")
    with pytest.raises(DataError, match=r"has train-\*.tar and train/; set data.source"):
        open_source(settings(tmp_path), "train")
    assert len(open_source(settings(tmp_path, "folder"), "train")) == 1
    assert len(open_source(settings(tmp_path, "shards"), "train")) == 6


def test_synthetic() -> None:
    chosen = DataSettings(
        source="synthetic", synthetic_samples=50, synthetic_classes=7, image_size=8, eval_resize=0
    )
    train, val = (open_source(chosen, split) for split in ("train", "val"))
    assert train.kind == "SyntheticImages"
    assert (len(train), len(val), len(train.classes)) == (50, 5, 7)
    assert np.shape(train.read(0)) == (8, 8, 3)
    assert not np.array_equal(train.read(0), val.read(0))


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
    notes: list[str] = []
    assert len(open_splits(str(tmp_path), on_note=notes.append)["train"]) == 8
    assert notes == ["full-0000.tar … have no split in their names: used as train"]
    with pytest.raises(DataError, match=r"do not have a split \(full-0000.tar\)"):
        open_splits(str(tmp_path), split="val")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        open_splits(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="data.dir is not set"):
        open_splits("")
    with pytest.raises(ConfigError, match="--split = 'test': unknown"):
        open_splits(str(tmp_path), split="test")
