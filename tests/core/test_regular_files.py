"""Reading a user's path neither waits nor fills the memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.core.files import open_regular, read_regular


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
