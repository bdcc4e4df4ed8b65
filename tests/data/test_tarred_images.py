"""ImageNet's archives as they are published, read where they lie."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources import tarred_images
from paceline.data.sources.source import open_source

Write = Callable[[Path, list[tuple[str, bytes]]], Path]
WNIDS = ["n01440764", "n01443537", "n02119789"]


def inner(directory: Path, write_tar: Write, first: int = 0) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    return [
        write_tar(
            directory / f"{wnid}.tar",
            [(f"{wnid}_{i}.JPEG", bytes([10 * k + i]) * (600 * i + 1)) for i in (2, 0, 1)],
        )
        for k, wnid in enumerate(WNIDS)
    ]


def check(root: Path) -> None:
    source = open_source(DataSettings(dir=str(root)), "train")
    assert source.classes == WNIDS
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for place in range(9):
        k, i = divmod(place, 3)
        assert source.read(place) == bytes([10 * k + i]) * (600 * i + 1)
        assert source.name(place).endswith(f":{WNIDS[k]}_{i}.JPEG")
    source.close()


def test_a_folder_of_class_tars(tmp_path: Path, write_tar: Write) -> None:
    inner(tmp_path / "train", write_tar)
    check(tmp_path)


def test_the_tar_of_class_tars(tmp_path: Path, write_tar: Write) -> None:
    paths = inner(tmp_path / "parts", write_tar)
    write_tar(
        tmp_path / "ILSVRC2012_img_train.tar",
        [(path.name, path.read_bytes()) for path in reversed(paths)],
    )
    check(tmp_path)


def test_the_flat_tar_of_validation(tmp_path: Path, write_tar: Write) -> None:
    inner(tmp_path / "train", write_tar)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (3, 1, 2)]
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", [(name, name.encode()) for name in names])
    (tmp_path / "val.txt").write_text("".join(f"{n} {i}\n" for i, n in enumerate(names)))
    source = open_source(DataSettings(dir=str(tmp_path)), "val", WNIDS)
    assert source.labels.tolist() == [1, 2, 0]
    assert [source.read(i) for i in range(3)] == [name.encode() for name in sorted(names)]
    with pytest.raises(DataError, match="nobody says which classes"):
        open_source(DataSettings(dir=str(tmp_path), source="imagenet"), "val")


def test_a_class_that_training_does_not_have(tmp_path: Path, write_tar: Write) -> None:
    inner(tmp_path / "train", write_tar)
    with pytest.raises(DataError, match=r"n02119789\.tar: not a class of the training data"):
        open_source(DataSettings(dir=str(tmp_path)), "train", WNIDS[:2])


@pytest.mark.parametrize("keep", [100, 700, 1600, 2000])
def test_a_download_that_was_cut(tmp_path: Path, write_tar: Write, keep: int) -> None:
    paths = inner(tmp_path / "train", write_tar)
    os.truncate(paths[1], keep)
    with pytest.raises(DataError, match=r"n01443537\.tar: (truncated|not a readable|damaged)"):
        open_source(DataSettings(dir=str(tmp_path)), "train")


def test_a_cut_inside_the_big_one(tmp_path: Path, write_tar: Write) -> None:
    paths = inner(tmp_path / "parts", write_tar)
    content = paths[0].read_bytes()
    write_tar(tmp_path / "ILSVRC2012_img_train.tar", [(paths[0].name, content[:2000])])
    with pytest.raises(DataError, match=r"img_train\.tar: (truncated|not a readable)"):
        open_source(DataSettings(dir=str(tmp_path)), "train")


def test_nothing_in_it(tmp_path: Path, write_tar: Write) -> None:
    (tmp_path / "train").mkdir()
    write_tar(tmp_path / "train" / "n01440764.tar", [("README", b"no image")])
    with pytest.raises(DataError, match="no image in it"):
        open_source(DataSettings(dir=str(tmp_path)), "train")


def test_an_empty_class_does_not_shift_the_others(tmp_path: Path, write_tar: Write) -> None:
    paths = inner(tmp_path / "train", write_tar)
    write_tar(paths[1], [("README", b"no image")])
    with pytest.raises(DataError, match=r"n01443537\.tar: no image in it"):
        open_source(DataSettings(dir=str(tmp_path)), "train")
    write_tar(
        tmp_path / "ILSVRC2012_img_train.tar", [(path.name, path.read_bytes()) for path in paths]
    )
    with pytest.raises(DataError, match=r"img_train\.tar: n01443537\.tar: no image in it"):
        open_source(DataSettings(dir=str(tmp_path), source="imagenet"), "train")


def test_changed_while_it_is_listed(
    tmp_path: Path, write_tar: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = inner(tmp_path / "train", write_tar)
    real = tarred_images.tar_members

    def slow(path: Path, content: BinaryIO) -> Iterator[tarfile.TarInfo]:
        yield from real(path, content)
        os.utime(paths[0], (1, 1))

    monkeypatch.setattr(tarred_images, "tar_members", slow)
    source = open_source(DataSettings(dir=str(tmp_path)), "train")
    with pytest.raises(DataError, match=r"n01440764\.tar: has changed since the start"):
        source.read(0)
    source.close()


def test_class_folders_and_tars_at_once(tmp_path: Path, write_tar: Write) -> None:
    inner(tmp_path / "train", write_tar)
    (tmp_path / "train" / WNIDS[0]).mkdir()
    (tmp_path / "train" / WNIDS[0] / "1.JPEG").write_bytes(b"image")
    with pytest.raises(DataError, match=r"class folders \(n0144.*\) and tars without one \(n0144"):
        open_source(DataSettings(dir=str(tmp_path)), "train")
    for name in WNIDS[1:]:
        (tmp_path / "train" / name).mkdir()
        (tmp_path / "train" / name / "1.JPEG").write_bytes(b"image")
    assert len(open_source(DataSettings(dir=str(tmp_path)), "train")) == len(WNIDS)
