"""Class folders, flat folders with label files, ImageNet's archives, and classes.json."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.small import encode
from fork_server import permissions_obeyed
from paceline.core.errors import DataError
from paceline.data import DataSettings, numbered_classes, open_source
from paceline.data.image import decode
from paceline.data.sources.classes import read_classes
from paceline.data.sources.folders import FlatFolder, ImageFiles, ImageFolder, class_directories

WNIDS = ["n01440764", "n01443537", "n02119789"]
NAMES = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 6)]
LABELS = [2, 0, 1, 1, 2]
FILES = {
    "val.txt": "".join(f"{n} {c}\n" for n, c in reversed(list(zip(NAMES, LABELS, strict=True)))),
    "val.txt ": "".join(f"val/{n} {WNIDS[c]}\n" for n, c in zip(NAMES, LABELS, strict=True)),
    "LOC_val_solution.csv": "ImageId,PredictionString\n"
    + "".join(f"{n[:-5]},{WNIDS[c]} 1 2 3 4 \n" for n, c in zip(NAMES, LABELS, strict=True)),
    "imagenet_2012_validation_synset_labels.txt": "".join(f"{WNIDS[c]}\n" for c in LABELS),
    "synset_labels.txt": "\n".join(WNIDS[c] for c in LABELS),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(
        ["dog/b.png", "dog/a.JPG", "cat/x/deep.jpeg", "cat/1.webp", "ant/z.png"]
    ):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(np.full((4, 4), number, dtype=np.uint8)))
    for name in ("dog/notes.txt", "cat/.hidden.png", "cat/.git/x.png", ".cache/a.png", "list.png"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not an image")
    return tmp_path / "train"


def test_classes_are_the_sorted_directories(root: Path) -> None:
    source = ImageFolder(root)
    assert source.classes == ["ant", "cat", "dog"]
    assert [Path(source.name(i)).relative_to(root).as_posix() for i in range(len(source))] == [
        "ant/z.png",
        "cat/1.webp",
        "cat/x/deep.jpeg",
        "dog/a.JPG",
        "dog/b.png",
    ]
    assert source.labels.tolist() == [0, 1, 1, 2, 2]
    assert source.labels.dtype == np.int64
    assert [int(np.asarray(decode(source.read(i), 1))[0, 0]) for i in range(5)] == [4, 3, 2, 1, 0]


def test_given_classes_decide_the_labels(root: Path) -> None:
    source = ImageFolder(root, ["aardvark", "ant", "bee", "cat", "dog"])
    assert source.labels.tolist() == [1, 3, 3, 4, 4]


def test_a_class_that_training_does_not_have(root: Path) -> None:
    with pytest.raises(DataError, match=r"dog: not a class of the training data"):
        ImageFolder(root, ["ant", "cat"])


def test_classes_without_images_are_left_out_with_a_note(root: Path) -> None:
    note = ImageFolder(root).note
    assert "train/: skipped 1 files that are not images" in note
    assert "train/: skipped images outside of class folders: list.png" in note
    (root / "bee").mkdir()
    (root / "fox" / "deep").mkdir(parents=True)
    source = ImageFolder(root)
    assert source.classes == ["ant", "cat", "dog"]
    assert "train/: no image in bee, fox;" in source.note
    for name in ("ant", "cat", "dog"):
        shutil.rmtree(root / name)
    with pytest.raises(DataError, match=r"no image .* in any of 2 class directories: bee, fox"):
        ImageFolder(root)


def test_a_link_to_a_class_directory_counts(root: Path, tmp_path: Path) -> None:
    (root / "wolf").symlink_to(root / "dog", target_is_directory=True)
    assert class_directories(root) == ["ant", "cat", "dog", "wolf"]
    assert len(ImageFolder(root)) == 7


def test_a_file_that_vanishes_is_no_corrupt_image(root: Path) -> None:
    source = ImageFolder(root)
    (root / "ant/z.png").unlink()
    with pytest.raises(DataError, match=r"ant/z\.png: cannot be read \(No such file"):
        source.read(0)
    source.close()


def test_a_directory_that_may_not_be_listed(root: Path) -> None:
    (root / "cat/x").chmod(0)
    with permissions_obeyed(), pytest.raises(DataError, match=r"cat/x: cannot be listed"):
        ImageFolder(root)
    (root / "cat/x").chmod(0o700)


def test_links_that_lead_in_a_circle(root: Path) -> None:
    plain = ImageFolder(root)
    (root / "cat" / "x" / "again").symlink_to(root / "cat", target_is_directory=True)
    (root / "cat" / "here").symlink_to(".", target_is_directory=True)
    (root / "dog" / "all").symlink_to("..", target_is_directory=True)
    source = ImageFolder(root)
    assert [source.name(i) for i in range(len(source))] == [plain.name(i) for i in range(5)]


def test_the_identity_tells_a_changed_file(root: Path, tmp_path: Path) -> None:
    before = ImageFolder(root).identity()
    shutil.copytree(root, tmp_path / "copy")  # with its times
    assert ImageFolder(tmp_path / "copy").identity() == before
    path = root / "dog" / "b.png"
    seen = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    assert ImageFolder(root).identity() != before
    path.write_bytes(b"shorter")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert ImageFolder(root).identity() != before
    path.rename(root / "dog" / "c.png")
    with pytest.raises(DataError, match=r"dog/b\.png: cannot be read"):
        listed(root, "dog/b.png").identity()


def test_the_identity_does_not_depend_on_the_pieces(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ImageFolder(root).identity()
    monkeypatch.setattr("paceline.data.sources.folders._STATS", 2)
    assert ImageFolder(root).identity() == whole


def listed(root: Path, *names: str) -> ImageFiles:
    return ImageFiles(root, names, [0] * len(names), ["dog"])


# --- images with a label file ----------------------------------------------------------------------


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


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [".", "val"])
def test_every_label_file(imagenet: Path, name: str, place: str) -> None:
    (imagenet / place / name.strip()).write_text(FILES[name])
    source = open_source(DataSettings(dir=str(imagenet)), "val")
    assert isinstance(source, FlatFolder)
    assert source.classes == WNIDS
    assert source.labels.tolist() == LABELS
    assert [source.read(i) for i in range(5)] == [bytes([i]) for i in range(5)]
    assert source.name(0).endswith("val/ILSVRC2012_val_00000001.JPEG")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("", "", "images without class folders, and no file with their labels; put one of val.txt"),
        ("val.txt", FILES["val.txt"].replace(NAMES[3], "x.JPEG"), f"no label for 1 of 5.*{NAMES[3]}"),
        ("val.txt", FILES["val.txt"].replace(" 0", " 3"), "val.txt:4: '3' is none of the 3 classes"),
        ("val.txt", FILES["val.txt"].replace(" 0", " -1"), "val.txt:4: '-1' is none of the 3"),
        ("synset_labels.txt", "n01440764\n", "1 labels for 5 images"),
        ("synset_labels.txt", "0\n" * 5, "synset_labels.txt:1: '0' is none of the 3 classes"),
        ("LOC_val_solution.csv", "ImageId\nx,n9 1 2 3 4\n", "solution.csv:2: 'n9' is none of"),
    ],
)  # fmt: skip
def test_wrong_label_files(imagenet: Path, name: str, content: str, line: str) -> None:
    if name:
        (imagenet / name).write_text(content)
    with pytest.raises(DataError, match=line):
        open_source(DataSettings(dir=str(imagenet)), "val")


def test_nobody_names_the_classes(imagenet: Path) -> None:
    (imagenet / "val.txt").write_text(FILES["val.txt"])
    (imagenet / "train").rename(imagenet / "elsewhere")
    with pytest.raises(DataError, match="names of the classes are unknown; put the training"):
        open_source(DataSettings(dir=str(imagenet)), "val")
    assert open_source(DataSettings(dir=str(imagenet)), "val", WNIDS).labels.tolist() == LABELS


# --- archives --------------------------------------------------------------------------------------


# --- classes.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        [{"cls": 1, "name": "dog"}, {"cls": 0, "name": "cat"}],
        {"dog": 1, "cat": 0},
        ["cat", "dog"],
        [{"cls": 0, "wnid": "cat"}, {"cls": 1, "wnid": "n2", "name": "dog"}],
    ],
)
def test_every_form(tmp_path: Path, content: object) -> None:
    (tmp_path / "classes.json").write_text(json.dumps(content))
    assert read_classes(tmp_path) == ["cat", "dog"]


def test_absent_is_not_wrong(tmp_path: Path) -> None:
    assert read_classes(tmp_path) is None
    assert numbered_classes(3) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "3",
        '[{"cls": 0, "name": "a"}, {"cls": 2, "name": "b"}]',
        '[{"cls": 0, "name": "a"}, {"cls": 0, "name": "b"}]',
        '[{"cls": 1, "name": "a"}]',
        '[{"cls": "0", "name": "a"}]',
        '[{"cls": true, "name": "a"}, {"cls": 0, "name": "b"}]',
        '[{"cls": 0}]',
        '{"a": 0.0}',
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(DataError, match=r"classes\.json: .*write it as"):
        read_classes(tmp_path)
