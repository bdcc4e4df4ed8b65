from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from paceline.data.decode import build as building
from paceline.data.decode.build import BuildError, build, cached_library
from paceline.data.decode.library import RegionLibrary


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_processes_that_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process renames a complete file, so no process sees a part of it."""
    slow = script(
        tmp_path / "cc",
        'while [ "$1" != -o ]; do shift; done; printf ha > "$2"; sleep 0.1; echo lf >> "$2"',
    )
    monkeypatch.setenv("CC", slow)
    target = tmp_path / "out" / "library.so"
    seen = set()
    with ThreadPoolExecutor(4) as pool:
        builds = [pool.submit(build, target) for _ in range(4)]
        while not all(done.done() for done in builds):
            seen.add(target.read_text() if target.exists() else "")
            sleep(0.005)
        for done in builds:
            done.result()
    assert seen <= {"", "half\n"}
    assert target.read_text() == "half\n"
    assert list(target.parent.iterdir()) == [target]


def test_only_its_owner_can_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode does not depend on the umask. Otherwise the file would not be loaded."""
    loose = 'umask 0; while [ "$1" != -o ]; do shift; done; echo > "$2"'
    monkeypatch.setenv("CC", script(tmp_path / "cc", loose))
    build(tmp_path / "library.so")
    assert (tmp_path / "library.so").stat().st_mode & 0o022 == 0


def failure(target: Path, *flags: str) -> BuildError:
    with pytest.raises(BuildError) as caught:
        build(target, *flags)
    assert not list(target.parent.glob("build-*"))
    return caught.value


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = failure(tmp_path / "x.so")
    assert error.cause == "no C compiler (cc, gcc, clang)"
    assert "libjpeg-dev" in error.remedy


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("x.c:13:10: fatal error: jpeglib.h: No such file", "libjpeg-turbo's header or library"),
        ("/usr/bin/ld: cannot find -ljpeg: No such file", "libjpeg-turbo's header or library"),
        ('x.c:9: error: #error "needs 2.0.6"\n more', "needs 2.0.6"),  # gcc
        ('x.c:9: error: "needs 2.0.6"\n more', "needs 2.0.6"),  # clang
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


def test_a_file_where_the_directory_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "true")
    (tmp_path / "deep").write_text("")
    error = failure(tmp_path / "deep" / "x.so")
    assert "cannot be written" in error.cause
    assert "XDG_CACHE_HOME" in error.remedy


def test_a_libjpeg_that_is_too_old(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header in front of the real one says that it is another version."""
    old = "#include_next <jpeglib.h>\n#undef LIBJPEG_TURBO_VERSION_NUMBER\n"
    (tmp_path / "jpeglib.h").write_text(old + "#define LIBJPEG_TURBO_VERSION_NUMBER 2000005\n")
    monkeypatch.setenv("CPATH", str(tmp_path))
    error = failure(tmp_path / "x.so", "-fsyntax-only")
    assert error.cause == "the region decoder needs libjpeg-turbo 2.0.6 or later"


def test_one_to_carry_elsewhere(compiler: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.data.decode.build", str(tmp_path / "carried.so")]
    source = str(Path(building.__file__).parents[3])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": source})
    assert RegionLibrary(tmp_path / "carried.so").version


# --- the user's cache --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the library. Nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "build", lambda path: path.write_text(""))
    return tmp_path / "cache" / "paceline" / "region"


def test_built_once_and_found_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is private, and the library is found after the compiler was removed."""
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
    """Nothing is built in such a directory."""
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
        monkeypatch.setattr(building.os, "geteuid", lambda: another)
    assert f"{folder} belongs to another user" in refusal()


def test_another_source_is_another_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached_library()
    copy = tmp_path / "copy"
    shutil.copytree(building.HERE, copy)
    (copy / "resample.c").write_text("another")
    monkeypatch.setattr(building, "HERE", copy)
    assert cached_library() != before
