"""Which source a directory is: its layout, also that of other tools, its splits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.small import samples, write_tar
from data_sets import png
from paceline.core.errors import ConfigError, DataError
from paceline.data import DataSettings, Source, inspect_set, open_data, open_source, open_splits

WNIDS = ["n01", "n02"]


def both(root: Path, **values: object) -> tuple[Source, Source]:
    return open_data(DataSettings(dir=str(root), **values))  # type: ignore[arg-type]


def images(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        (folder / name).write_bytes(png(i))
    return folder


# --- shards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("source", ["auto", "shards"])
def test_shards_in_the_folders_of_splits_keep_their_labels(
    tmp_path: Path, suffix: str, source: str
) -> None:
    for split, count in (("train", 6), ("val", 3)):
        (tmp_path / split).mkdir()
        for number in range(2):
            write_tar(
                tmp_path / split / f"{number:05d}{suffix}", samples(count, first=number * count)
            )
    train, val = both(tmp_path, source=source)
    assert (train.kind, len(train), list(train.classes)) == ("TarShards", 12, ["0", "1", "2"])
    assert (val.kind, val.labels.tolist()) == ("TarShards", [0, 1, 2, 0, 1, 2])
    report = inspect_set(str(tmp_path))
    assert report.problems == []
    assert [report.splits[split].classes for split in ("train", "val")] == [3, 3]
    (tmp_path / "train" / "classes.json").write_text(json.dumps(["a", "b", "c"]))
    assert list(both(tmp_path)[0].classes) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"),
        ("Training_0.tar", "valid_0.tar"),
        ("train-0.tar.gz", "my-val-0.tgz"),
        ("cifar10-train-000000.tar", "cifar10-test-000000.tar"),
    ],
)
def test_the_split_of_shards_is_in_their_names(tmp_path: Path, train: str, val: str) -> None:
    write_tar(tmp_path / train, samples(6))
    write_tar(tmp_path / val, samples(3))
    first, second = both(tmp_path)
    assert (len(first), len(second)) == (6, 3)
    assert ("validation set" in second.note) == ("test" in val)
    assert {name: len(s) for name, s in open_splits(str(tmp_path)).items()} == {
        "train": 6,
        "val": 3,
    }


def test_archives_beside_class_folders_are_no_shards(tmp_path: Path) -> None:
    for split in ("train", "val"):
        images(tmp_path / split / "a", "1.png")
        write_tar(tmp_path / f"{split}.tar", [(f"{split}/a/1.png", png(1))])
    assert [source.kind for source in both(tmp_path)] == ["ImageFolder"] * 2
    assert inspect_set(str(tmp_path)).problems == []


# --- ImageNet and its relatives --------------------------------------------------------------------


def test_tiny_imagenet_as_published(tmp_path: Path) -> None:
    for wnid in WNIDS:
        images(tmp_path / "train" / wnid / "images", f"{wnid}_0.JPEG", f"{wnid}_1.JPEG")
        (tmp_path / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    images(tmp_path / "val" / "images", "val_0.JPEG", "val_1.JPEG", "val_10.JPEG")
    images(tmp_path / "test" / "images", "test_0.JPEG")
    lines = (
        "val_0.JPEG\tn02\t0\t0\t9\t9\nval_10.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n"
    )
    (tmp_path / "val" / "val_annotations.txt").write_text(lines)
    train, val = both(tmp_path)
    assert (list(train.classes), train.labels.tolist()) == (WNIDS, [0, 0, 1, 1])
    assert [Path(val.name(i)).name for i in range(3)] == ["val_0.JPEG", "val_1.JPEG", "val_10.JPEG"]
    assert val.labels.tolist() == [1, 1, 0]
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG n02\n")
    with pytest.raises(DataError, match=r"val_annotations.txt:1: '' is none of the 2 classes"):
        both(tmp_path)


def test_imagenet_as_kaggle_has_it(tmp_path: Path) -> None:
    root = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    for wnid in WNIDS:
        images(root / "train" / wnid, f"{wnid}_0.JPEG")
    images(root / "val", "ILSVRC2012_val_00000001.JPEG")
    images(root / "test", "ILSVRC2012_test_00000001.JPEG")
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\nILSVRC2012_val_00000001,n02 1 2 3 4 \n"
    )
    for place in (tmp_path, root):
        train, val = both(place)
        assert (len(train), val.labels.tolist()) == (2, [1])
        assert list(open_splits(str(place))) == ["train", "val"]


def test_metadata_in_lines_of_json(tmp_path: Path) -> None:
    for split, rows in (
        ("train", [("1.png", "dog"), ("2.png", "a, b")]),
        ("validation", [("1.png", "dog")]),
    ):
        folder = images(tmp_path / split, *(name for name, _ in rows))
        lines = [json.dumps({"file_name": name, "label": text}) for name, text in rows]
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n\n")
    train, val = both(tmp_path)
    assert (list(train.classes), train.labels.tolist()) == (["a, b", "dog"], [1, 0])
    assert val.labels.tolist() == [1]
    path = tmp_path / "train" / "metadata.jsonl"
    path.write_text('{"file_name": "1.png", "label": 2}\n{"file_name": "2.png", "label": 0}\n')
    assert open_source(DataSettings(dir=str(tmp_path)), "train").labels.tolist() == [2, 0]
    for line, problem in (
        ('{"file_name": "2.png", "label": true}', "row 2 has no file_name or no label"),
        ('{"file_name": "../2.png", "label": 1}', "row 2: '../2.png' is not below"),
        ('{"file_name": "3.png", "label": 1}', "row 2: no file '3.png'"),
        ("[]", "row 2 has no file_name or no label"),
        ("{", "metadata.jsonl: cannot be read"),
    ):
        path.write_text('{"file_name": "1.png", "label": 2}\n' + line)
        with pytest.raises(DataError, match=problem):
            open_source(DataSettings(dir=str(tmp_path)), "train")


# --- data that is not found -------------------------------------------------------------------------


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00002.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"neither train-\*.tar.* pl.Trainer"):
        both(tmp_path)


@pytest.mark.parametrize("content", ["train/cat", "cat", "train-0.tar"])
def test_a_directory_above_the_data_set_names_it(tmp_path: Path, content: str) -> None:
    root = tmp_path / "dataset"
    if content.endswith(".tar"):
        root.mkdir()
        (root / content).touch()
    else:
        images(root / content, "1.png")
        images((root / content).with_name("dog"), "1.png")
    with pytest.raises(DataError, match=f"use --data-dir {root}$"):
        open_source(DataSettings(dir=str(tmp_path)), "train")


def test_data_sets_are_not_classes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        for split in ("train", "val"):
            images(tmp_path / name / split / "cat", "1.png")
    with pytest.raises(DataError, match=f"use --data-dir {tmp_path / 'first'}$"):
        both(tmp_path, val_split=0.5)


def settings(directory: Path, source: str = "auto") -> DataSettings:
    return DataSettings(dir=str(directory), source=source)


def test_the_embedded_set_is_taken_only_where_it_is_named() -> None:
    source = open_source(DataSettings(source="embedded"), "val")
    assert source.kind == "TarShards"
    assert len(source) == 2000
    with pytest.raises(DataError, match="data.dir is not set; --data-dir takes"):
        open_source(DataSettings(), "val")


def test_shards_are_found(tmp_path: Path) -> None:
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


def test_training_classes_hold_for_validation(tmp_path: Path) -> None:
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
def test_missing_split(tmp_path: Path, source: str, looked_for: str) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    with pytest.raises(DataError, match=looked_for):
        open_source(settings(tmp_path, source), "val")


def test_both_layouts_at_once(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    make_folder(tmp_path, "train/a")
    with pytest.raises(
        DataError, match=r"of several kinds: train-\*.tar and train/; set data.source"
    ):
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


def test_all_splits_that_are_there(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", samples(6))
    assert list(open_splits(str(tmp_path))) == ["train"]
    write_tar(tmp_path / "val-0.tar", samples(2, classes=1))
    found = open_splits(str(tmp_path))
    assert {name: len(source) for name, source in found.items()} == {"train": 6, "val": 2}
    assert found["val"].classes == found["train"].classes
    assert list(open_splits(str(tmp_path), split="val")) == ["val"]


def test_shards_without_a_split_in_their_name(tmp_path: Path) -> None:
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
