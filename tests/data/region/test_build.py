from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.data.region import build as building
from paceline.data.region.build import BuildError, build, cached_library
from paceline.data.region.library import RegionLibrary


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_built_once_and_found_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that only its owner can write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = cached_library()
    assert path.parent == tmp_path / "cache" / "paceline"
    assert path.parent.stat().st_mode & 0o077 == 0
    assert RegionLibrary(path).version.startswith("libjpeg-turbo ")
    monkeypatch.setenv("CC", "false")
    assert cached_library() == path
    assert list(path.parent.iterdir()) == [path]


def test_processes_that_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves a whole file into place; nobody sees half of one."""
    slow = script(
        tmp_path / "cc", 'while [ "$1" != -o ]; do shift; done; echo whole > "$2"; sleep 0.1'
    )
    monkeypatch.setenv("CC", slow)
    target = tmp_path / "out" / "library.so"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build(target), range(4)))
    assert target.read_text() == "whole\n"
    assert list(target.parent.iterdir()) == [target]


def test_a_new_source_is_a_new_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "build", lambda path: path.write_text(""))
    (tmp_path / "paceline").mkdir()
    before = cached_library()
    copy = tmp_path / "copy"
    shutil.copytree(building.HERE, copy)
    (copy / "weights.c").write_text("another")
    monkeypatch.setattr(building, "HERE", copy)
    assert cached_library() != before


def failure(target: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        build(target)
    assert not list(target.parent.glob("build-*"))
    return caught.value


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = failure(tmp_path / "x.so")
    assert error.cause == "no C compiler (cc, gcc, clang)"
    assert "libjpeg-dev" in error.remedy


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert "does not run" in failure(tmp_path / "x.so").cause


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("x.c:13:10: fatal error: jpeglib.h: No such file", "libjpeg-turbo's header or library"),
        ("/usr/bin/ld: cannot find -ljpeg: No such file", "libjpeg-turbo's header or library"),
        ("note\nx.c:1: error: all wrong\nmore", "fails: x.c:1: error: all wrong"),
        ("", "fails: exit code 3"),
    ],
)
def test_what_the_compiler_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, cause: str
) -> None:
    (tmp_path / "said").write_text(said)
    monkeypatch.setenv("CC", script(tmp_path / "cc", f"cat {tmp_path}/said >&2; exit 3"))
    assert cause in failure(tmp_path / "x.so").cause


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "true")
    tmp_path.chmod(0o500)
    assert "cannot be written" in failure(tmp_path / "deep" / "x.so").cause


def test_a_file_where_the_directory_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "true")
    (tmp_path / "deep").write_text("")
    error = failure(tmp_path / "deep" / "x.so")
    assert "cannot be written" in error.cause
    assert "XDG_CACHE_HOME" in error.remedy


def test_one_to_carry_elsewhere(compiler: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.data.region.build", str(tmp_path / "carried.so")]
    source = str(Path(building.__file__).parents[3])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": source})
    assert RegionLibrary(tmp_path / "carried.so").version
