"""ImageNet's validation folder as it is published: flat, with the labels in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources.flat_folder import FlatFolder
from paceline.data.sources.source import open_source

WNIDS = ["n01440764", "n01443537", "n02119789"]
NAMES = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 6)]
LABELS = [2, 0, 1, 1, 2]
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"

FILES = {
    "val.txt": "".join(f"{n} {c}\n" for n, c in reversed(list(zip(NAMES, LABELS, strict=True)))),
    "val.txt ": "".join(f"val/{n} {WNIDS[c]}\n" for n, c in zip(NAMES, LABELS, strict=True)),
    "LOC_val_solution.csv": "ImageId,PredictionString\n"
    + "".join(f"{n[:-5]},{WNIDS[c]} 1 2 3 4 \n" for n, c in zip(NAMES, LABELS, strict=True)),
    "imagenet_2012_validation_synset_labels.txt": "".join(f"{WNIDS[c]}\n" for c in LABELS),
    "synset_labels.txt": "\n".join(WNIDS[c] for c in LABELS),
    # The devkit counts from 1, in an order of its own.
    GROUND_TRUTH: "".join(f"{3 - c}\n" for c in LABELS),
}


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for wnid in WNIDS:
        (tmp_path / "train" / wnid).mkdir(parents=True)
        (tmp_path / "train" / wnid / f"{wnid}_1.JPEG").write_bytes(b"image")
    (tmp_path / "val").mkdir()
    for i, name in enumerate(NAMES):
        (tmp_path / "val" / name).write_bytes(bytes([i]))
    (tmp_path / "val" / "._junk.JPEG").write_bytes(b"")
    return tmp_path


def write_map(directory: Path) -> None:
    lines = [f"{wnid} {3 - i} name_{i}\n" for i, wnid in enumerate(WNIDS)]
    (directory / "map_clsloc.txt").write_text("".join(lines))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [".", "val"])
def test_every_label_file(imagenet: Path, name: str, place: str) -> None:
    (imagenet / place / name.strip()).write_text(FILES[name])
    write_map(imagenet / place)
    source = open_source(DataSettings(dir=str(imagenet)), "val")
    assert isinstance(source, FlatFolder)
    assert source.classes == WNIDS
    assert source.labels.tolist() == LABELS
    assert [source.read(i) for i in range(5)] == [bytes([i]) for i in range(5)]
    assert source.name(0).endswith("val/ILSVRC2012_val_00000001.JPEG")


def test_class_folders_need_no_file(imagenet: Path) -> None:
    assert open_source(DataSettings(dir=str(imagenet)), "train").labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("", "", "images without class folders, and no file with their labels; put one of val.txt"),
        ("val.txt", FILES["val.txt"].replace(NAMES[3], "x.JPEG"), f"no label for 1 of 5.*{NAMES[3]}"),
        ("val.txt", FILES["val.txt"].replace(" 0", " 3"), "val.txt:4: '3' is none of the 3 classes"),
        ("val.txt", FILES["val.txt"].replace(" 0", " -1"), "val.txt:4: '-1' is none of the 3"),
        ("synset_labels.txt", "n01440764\n", "1 labels for 5 images"),
        ("synset_labels.txt", "0\n" * 5, "synset_labels.txt:1: '0' is none of the 3 classes"),
        (GROUND_TRUTH, "1\n2\n3\n1\n9\n", f"{GROUND_TRUTH}:5: '9' is not in map_clsloc.txt"),
        ("LOC_val_solution.csv", "ImageId\nx,n9 1 2 3 4\n", "solution.csv:2: 'n9' is none of"),
    ],
)  # fmt: skip
def test_wrong_label_files(imagenet: Path, name: str, content: str, line: str) -> None:
    if name:
        (imagenet / name).write_text(content)
        write_map(imagenet)
    with pytest.raises(DataError, match=line):
        open_source(DataSettings(dir=str(imagenet)), "val")


def test_the_devkits_numbers_are_not_guessed(imagenet: Path) -> None:
    (imagenet / GROUND_TRUTH).write_text(FILES[GROUND_TRUTH])
    with pytest.raises(DataError, match="devkit's own order, and map_clsloc.txt is not there"):
        open_source(DataSettings(dir=str(imagenet)), "val")


def test_nobody_names_the_classes(imagenet: Path) -> None:
    (imagenet / "val.txt").write_text(FILES["val.txt"])
    (imagenet / "train").rename(imagenet / "elsewhere")
    with pytest.raises(DataError, match="nobody says which classes there are; put the training"):
        open_source(DataSettings(dir=str(imagenet)), "val")
    assert open_source(DataSettings(dir=str(imagenet)), "val", WNIDS).labels.tolist() == LABELS
