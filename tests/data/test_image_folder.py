from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.decoding.decode import decode
from paceline.data.sources.image_files import ImageFiles
from paceline.data.sources.image_folder import ImageFolder, class_directories


@pytest.fixture
def root(tmp_path: Path, png: Callable[..., bytes]) -> Path:
    for number, name in enumerate(
        ["dog/b.png", "dog/a.JPG", "cat/x/deep.jpeg", "cat/1.webp", "ant/z.png"]
    ):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(np.full((4, 4), number, dtype=np.uint8)))
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


def test_empty_classes_are_named(root: Path) -> None:
    (root / "eel").mkdir()
    (root / "fox" / "deep").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no image .* in 2 of 5 class directories: eel, fox"):
        ImageFolder(root)


def test_no_class_directories(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class directories"):
        ImageFolder(tmp_path)


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


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: cannot be listed"):
        ImageFolder(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every directory")
def test_a_directory_that_may_not_be_listed(root: Path) -> None:
    (root / "cat/x").chmod(0)
    with pytest.raises(DataError, match=r"cat/x: cannot be listed"):
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


def listed(root: Path, *names: str) -> ImageFiles:
    return ImageFiles(root, names, [0] * len(names), ["dog"])
