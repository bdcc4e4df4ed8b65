from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint import link_atomically, write_atomically


def test_content_arrives_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    write_atomically(target, b"one")
    write_atomically(target, memoryview(b"two"))
    assert target.read_bytes() == b"two"
    assert [p.name for p in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"good")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if place == "fsync" else (Path, "replace")), full)
    with pytest.raises(CheckpointError, match="no space left to write"):
        write_atomically(target, b"half")
    assert target.read_bytes() == b"good"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_second_name_is_a_link_and_a_copy_where_links_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"data")
    link_atomically(source, tmp_path / "b")
    assert (tmp_path / "b").samefile(source)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    link_atomically(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"data"
    assert not (tmp_path / "b").samefile(source)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_atomically(tmp_path / "file" / "under", b"x")
