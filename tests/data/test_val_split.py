"""`data.val_split`, and the layouts that need it: photos in class folders, Hugging Face's folders."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from data.small import MemorySource, eval_loader
from data_sets import png, write_folders, write_shards
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    DataSettings,
    Source,
    open_data,
    open_source,
)
from paceline.data.sources.base import validation_indices


def chosen(directory: Path, **values: object) -> DataSettings:
    return DataSettings(dir=str(directory), image_size=8, **values)  # type: ignore[arg-type]


def photos(root: Path, *names: str, count: int = 5) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png(i))
    return root


def names(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_the_split_is_by_class_and_of_the_labels_alone() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 1000)
    held = validation_indices(labels, 0.1)
    for label in range(7):
        count = int((labels == label).sum())
        assert (labels[held] == label).sum() == round(0.1 * count)
    assert np.array_equal(held, validation_indices(labels, 0.1))
    # One class grows: the others keep theirs.
    grown = validation_indices(np.append(labels, [3] * 50), 0.1)
    assert {i for i in held if labels[i] != 3} == {i for i in grown if i < 1000 and labels[i] != 3}
    # At least one of each class, and never all of them.
    assert validation_indices(np.array([0, 0, 1, 2, 2]), 0.01).size == 2
    assert validation_indices(np.array([0, 0, 1, 2, 2]), 0.99).size == 2


@pytest.mark.parametrize("kind", ["shards", "folder", "photos", "cifar10"])
def test_every_source_is_split_with_all_it_can_do(
    tmp_path: Path, small_cifar: object, kind: str
) -> None:
    if kind == "shards":
        root = write_shards(tmp_path, train=40)
        (root / "val-0.tar").unlink()
    elif kind == "folder":
        write_folders(tmp_path / "all", train=40)
        (tmp_path / "all" / "train").rename(tmp_path / "train")
        root = tmp_path
    elif kind == "photos":
        root = photos(tmp_path / "p", "ein Tier", "bär", "cat", "dog", count=10)
    else:
        root = small_cifar.write(tmp_path, "bin")  # type: ignore[attr-defined]
        (root / "test_batch.bin").unlink()
    settings = chosen(root, val_split=0.25)
    train, val = open_data(settings)
    again = open_source(settings, "val", train.classes)
    whole = open_source(chosen(root), "train")
    assert sorted(names(train) + names(val)) == sorted(names(whole))
    assert names(again) == names(val)
    assert train.has_extents == whole.has_extents == (kind == "shards")
    assert (train.pixels is None) == (whole.pixels is None) == (kind != "cifar10")
    assert "data.val_split = 0.25" in train.note
    if kind == "shards":
        assert (sum(train.shard_sizes), len(train.shard_sizes)) == (len(train), 2)
        assert train.extent(0) is not None
    if train.pixels is not None:
        assert np.array_equal(train.pixels[3], train.read(3))
    with eval_loader(val, settings, batch_size=4) as loader:
        assert sum(len(batch) for batch in loader) == len(val)
    for source in (train, val, again, whole):
        source.close()


def test_a_validation_set_is_not_ignored(tmp_path: Path) -> None:
    write_folders(tmp_path)
    with pytest.raises(
        ConfigError, match=r"data.val_split = 0.1: there is a validation set \(val/\)"
    ):
        open_data(chosen(tmp_path, val_split=0.1))
    with pytest.raises(ConfigError, match=r"data.source = embedded"):
        open_data(DataSettings(source="embedded", val_split=0.1))


def test_without_a_validation_set(tmp_path: Path) -> None:
    root = photos(tmp_path, "a", "b")
    with pytest.raises(DataError, match="use --val-split 0.1"):
        open_data(chosen(root))
    single = photos(tmp_path / "x" / "train", "a", "b", count=1).parent
    with pytest.raises(ConfigError, match="needs a class with two"):
        open_data(chosen(single, val_split=0.1))


@pytest.mark.parametrize("source", ["auto", "folder"])
def test_one_class_or_none(tmp_path: Path, source: str) -> None:
    one = photos(tmp_path / "one", "cat")
    with pytest.raises(DataError, match=rf"^only one class \(cat\) in {one}; training needs two"):
        open_data(chosen(one, val_split=0.2, source=source))
    flat = photos(tmp_path / "all", "flat") / "flat"
    with pytest.raises(
        DataError, match=rf"^images without class folders in {flat} .* {flat}/<class>/"
    ):
        open_data(chosen(flat, val_split=0.2, source=source))


def test_a_source_of_the_user() -> None:
    whole = MemorySource(12)
    whole.labels = whole.labels % 3
    with pytest.raises(DataError, match="give val_data, or set data.val_split"):
        open_data(DataSettings(), whole)
    train, val = open_data(DataSettings(val_split=0.25), whole)
    assert (len(train), len(val)) == (9, 3)
    with pytest.raises(ConfigError, match="val_data"):
        open_data(DataSettings(val_split=0.25), whole, whole)
    with pytest.raises(ConfigError, match="data.cache"):
        open_data(DataSettings(cache="disk", cache_dir="x"), whole, whole)


@pytest.mark.parametrize("folder", ["validation", "valid", "Val", "VALIDATION", "test"])
def test_names_of_the_validation_folder(tmp_path: Path, folder: str) -> None:
    photos(tmp_path / "Train", "a", "b")
    photos(tmp_path / folder, "b", count=2)
    train, val = open_data(chosen(tmp_path))
    assert (len(train), val.labels.tolist()) == (10, [1, 1])
    assert ("test/ is the validation set" in val.note) == (folder == "test")
    if folder == "validation":
        photos(tmp_path / "test", "a")
        assert len(open_data(chosen(tmp_path))[1]) == 2, "test stays for the test"
        photos(tmp_path / "val", "a")
        with pytest.raises(DataError, match=r"has val/ and validation/"):
            open_data(chosen(tmp_path))


def write_metadata(root: Path, rows: list[tuple[str, object]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with (root / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "label"), *rows])
    for i, (name, _) in enumerate(rows):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(png(i))


def test_metadata_of_hugging_face(tmp_path: Path) -> None:
    write_metadata(tmp_path / "train", [("x/1.png", "dog"), ("2.png", "a, b"), ("3.png", "dog")])
    write_metadata(tmp_path / "validation", [("1.png", "dog")])
    train, val = open_data(chosen(tmp_path))
    assert (list(train.classes), train.labels.tolist()) == (["a, b", "dog"], [1, 0, 1])
    assert val.labels.tolist() == [1]
    assert train.read(1) == png(1)
    write_metadata(tmp_path / "numbers", [(f"{i}.png", i % 3) for i in range(9)])
    train, val = open_data(chosen(tmp_path / "numbers", val_split=0.3))
    assert (list(train.classes), len(train), len(val)) == (["0", "1", "2"], 6, 3)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("", "has no row"),
        ("1.png,\n", "row 2 has no file_name or no label"),
        ("../1.png,a\n", "row 2: '../1.png' is not below the folder"),
        ("absent.png,a\n", "row 2: no file 'absent.png'"),
    ],
)
def test_metadata_that_is_wrong(tmp_path: Path, rows: str, line: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\n" + rows)
    with pytest.raises(DataError, match=line):
        open_source(chosen(tmp_path), "train")
