from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.data.region import build as building
from paceline.data.region import cache
from paceline.data.region.build import BuildError
from paceline.data.region.cache import cached_library
from paceline.data.region.library import RegionLibrary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library goes. Nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "build", lambda path: path.write_text(""))
    return tmp_path / "cache" / "paceline" / "region"


def test_built_once_and_found_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that only its owner can write to; also where the compiler has gone since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = cached_library()
    assert path.parent == tmp_path / "cache" / "paceline" / "region"
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "libjpeg-turbo " in RegionLibrary(path).version
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(building, "build", lambda *_: pytest.fail("built again"))
    assert cached_library() == path
    assert list(path.parent.iterdir()) == [path]


def refusal() -> str:
    with pytest.raises(BuildError) as caught:
        cached_library()
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_to(folder: Path, mode: int) -> None:
    """There nothing is built either."""
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert f"{folder} can be written by others" in refusal()
    assert not list(folder.iterdir())


def test_a_library_that_others_can_write_to(folder: Path) -> None:
    path = cached_library()
    path.chmod(0o770)
    assert f"{path} can be written by others" in refusal()


def test_a_library_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    path = cached_library()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert f"{path} is a link" in refusal()


def test_what_belongs_to_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_library()
    if os.geteuid() == 0:
        os.chown(folder, 4321, -1)
    else:
        another = os.geteuid() + 1
        monkeypatch.setattr(cache.os, "geteuid", lambda: another)
    assert f"{folder} belongs to another user" in refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what is root's")
def test_what_belongs_to_root_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_library()
    monkeypatch.setattr(cache.os, "geteuid", lambda: 4321)
    assert cached_library() == path


def test_without_headers_a_library_of_the_same_code_will_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise BuildError("no jpeglib.h", "install it")

    path = cached_library()
    monkeypatch.setattr(cache, "_libjpeg_headers", list)
    monkeypatch.setenv("CC", "another")
    monkeypatch.setattr(building, "build", fail)
    assert cached_library() == path
    monkeypatch.setattr(cache, "_code_key", lambda: "other-code")
    assert "no jpeglib.h" in refusal()


@pytest.mark.parametrize("base", ["", "relative", "./here"])
def test_a_relative_cache_home_counts_as_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_library().parent == tmp_path / "home" / ".cache" / "paceline" / "region"


def test_a_file_where_the_directory_should_be(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    assert "cannot be written" in refusal()


def test_another_source_is_another_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached_library()
    copy = tmp_path / "copy"
    shutil.copytree(building.HERE, copy)
    (copy / "weights.c").write_text("another")
    monkeypatch.setattr(building, "HERE", copy)
    assert cached_library() != before


def test_another_compiler_machine_or_libjpeg_is_another_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {cached_library()}
    monkeypatch.setenv("CC", "another")
    found.add(cached_library())
    monkeypatch.setattr(cache.platform, "machine", lambda: "another")
    found.add(cached_library())
    monkeypatch.setenv("CPATH", f"/nowhere{os.pathsep}{tmp_path}")
    (tmp_path / "jconfig.h").write_text("#define LIBJPEG_TURBO_VERSION 9.9.9")
    found.add(cached_library())
    assert len(found) == 4
