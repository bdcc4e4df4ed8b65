from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.written_file import write_file, written_file


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def fail_half_way() -> None:
        with written_file(path) as file:
            file.write(b"half")
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_file_larger_than_this_process_may_write(tmp_path: Path) -> None:
    """A real refusal of the operating system, as a full disk gives it."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"file: cannot be written \(File too large\); free"):
            write_file(tmp_path / "file", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent/file: cannot be written \(No such file"):
        write_file(tmp_path / "absent" / "file", b"")


def test_nobody_can_lay_a_link_where_it_will_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(victim)
    write_file(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"precious"
    # Not even who could guess it.
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 16)
    (tmp_path / ".file.0000000000000000.tmp").symlink_to(victim)
    with pytest.raises(DataError, match=r"file: cannot be written \(File exists"):
        write_file(tmp_path / "file", b"newer")
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "file").read_bytes() == b"new"
