"""One process of a host opens a data set; the others make the same sources without a look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tarfile import TarInfo
from typing import BinaryIO

import numpy as np
import pytest
from safetensors import SafetensorError

from data_sets import write_folders, write_shards
from paceline.core.errors import DataError
from paceline.data import DataSettings, OpenedFiles, Source, open_data
from paceline.data.sources import archives as tar_sources
from paceline.data.sources.base import source_identity


def opened_twice(settings: DataSettings) -> tuple[tuple[Source, Source], tuple[Source, Source]]:
    """By the first process of a host, and by another one that has its file."""
    first = OpenedFiles(settings)
    own = open_data(settings, opened=first)
    path = first.write()
    assert path is not None
    try:
        shared = OpenedFiles.read(path, settings)
    finally:
        path.unlink()
    assert shared is not None
    return own, open_data(settings, opened=shared)


def check_same(own: Source, shared: Source) -> None:
    assert list(own.classes) == list(shared.classes)
    assert np.array_equal(own.labels, shared.labels)
    assert own.shard_sizes == shared.shard_sizes
    for i in range(len(own)):
        assert own.name(i) == shared.name(i)
        assert own.read(i) == shared.read(i)
    assert source_identity(own) == source_identity(shared)


@pytest.mark.parametrize("kind", ["shards", "folders"])
@pytest.mark.parametrize("val_split", [0.0, 0.25])
def test_both_processes_have_the_same_data(tmp_path: Path, kind: str, val_split: float) -> None:
    write = write_shards if kind == "shards" else write_folders
    root = write(tmp_path)
    if val_split and kind == "shards":
        for path in root.glob("val-*"):
            path.unlink()
    elif val_split:
        (root / "val").rename(tmp_path / "elsewhere")
    settings = DataSettings(dir=str(root), val_split=val_split)
    for own, shared in zip(*opened_twice(settings), strict=True):
        check_same(own, shared)


def test_tars_of_imagenet_are_read_once_a_host(
    tmp_path: Path, write_tar: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing the members of the tars reads all of their headers."""
    wnids = ["n01440764", "n01443537"]
    (tmp_path / "train").mkdir()
    for wnid in wnids:
        images = [(f"{wnid}_{i}.JPEG", wnid.encode() * (i + 1)) for i in (2, 0, 1)]
        write_tar(tmp_path / "train" / f"{wnid}.tar", images)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (3, 1, 2)]
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", [(name, name.encode()) for name in names])
    (tmp_path / "val.txt").write_text("".join(f"{n} {i % 2}\n" for i, n in enumerate(names)))
    listed: list[str] = []
    members = tar_sources.tar_members

    def noted(path: Path, content: BinaryIO) -> Iterator[TarInfo]:
        listed.append(path.name)
        return members(path, content)

    monkeypatch.setattr(tar_sources, "tar_members", noted)
    settings = DataSettings(dir=str(tmp_path))
    for own, shared in zip(*opened_twice(settings), strict=True):
        check_same(own, shared)
    assert len(listed) == len(set(listed)) == 3


def test_another_data_set_is_not_taken_for_it(tmp_path: Path) -> None:
    settings = DataSettings(dir=str(write_shards(tmp_path)))
    opened = OpenedFiles(settings)
    open_data(settings, opened=opened)
    path = opened.write()
    assert path is not None
    assert OpenedFiles.read(path, DataSettings(dir=str(tmp_path / "other"))) is None
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        OpenedFiles.read(path, settings)
    path.unlink()
    assert OpenedFiles.read(path, settings) is None, "as on another host"


def test_data_in_memory_has_nothing_to_share() -> None:
    settings = DataSettings(source="synthetic")
    opened = OpenedFiles(settings)
    open_data(settings, opened=opened)
    assert opened.write() is None


def test_a_host_without_memory_for_it_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors reports a full file system as an error of its own."""
    settings = DataSettings(dir=str(write_shards(tmp_path / "data")))
    opened = OpenedFiles(settings)
    open_data(settings, opened=opened)
    written: list[Path] = []

    def full(_: object, path: Path, **__: object) -> None:
        written.append(path)
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("paceline.data.sources.opened_files.save_file", full)
    assert opened.write() is None
    assert [path.exists() for path in written] == [False]
