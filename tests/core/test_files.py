"""Files: a user's path is read without waiting or filling the memory; whole files are there or not."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from paceline.core import files as module
from paceline.core.files import (
    LEFTOVERS,
    open_part,
    open_regular,
    part_path,
    read_regular,
    sync_directory,
    whole_file,
)


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "again").symlink_to("link")
    assert read_regular(tmp_path / "again") == b"content"
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["pipe", "zero", "socket", "folder", "loop"])
def test_nothing_else_is_read(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        request.addfinalizer(listener.close)
        listener.bind(str(target))
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("/dev/zero" if kind == "zero" else target)
    link.symlink_to(target)
    for path in (target, link):
        with pytest.raises(OSError, match=r"\[Errno"):
            read_regular(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    with pytest.raises(OSError, match="larger"):
        read_regular(tmp_path / "hole")


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_the_name_appears_only_with_all_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(list(tmp_path.glob(LEFTOVERS))) == 1
    assert path.read_bytes() == b"new"
    assert _names(tmp_path) == ["plan.json"]


def test_what_was_written_can_be_read_back_before_it_has_its_name(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as file:
        file.write(b"bytes")
        file.seek(0)
        assert file.read() == b"bytes"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def killed() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        killed()
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["plan.json"]


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first", "the last to end wins, whole"
    assert _names(tmp_path) == ["a"]


def test_a_link_laid_in_the_way_is_not_followed(tmp_path: Path) -> None:
    part, target = part_path(tmp_path / "a"), tmp_path / "target"
    part.symlink_to(target)
    with pytest.raises(FileExistsError):
        open_part(part)
    assert not target.exists()


@pytest.mark.parametrize(
    ("number", "raises"),
    [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EACCES, False), (errno.EIO, True)],
)
def test_only_a_directory_that_cannot_be_synced_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "fsync", refuse)
    if raises:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_directory(tmp_path)
    else:
        sync_directory(tmp_path)
