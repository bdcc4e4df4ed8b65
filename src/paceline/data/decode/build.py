"""Builds the library of the region decoder, and keeps it in the user's cache.

A shared library is compiled from the C files in this directory, with a compiler and libjpeg-turbo's
headers; every Python version loads it. There is one for each user, source and libjpeg, under
`$XDG_CACHE_HOME/paceline/region` or `~/.cache`, which nobody else can have written. It is written
under another name and then renamed, so processes that build at the same time do no harm. `python -m
paceline.data.decode.build FILE` builds one to carry elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.files import user_cache

SOURCES = ("header.c", "resample.c", "square.c", "region.c")
HEADERS = ("region.h",)
HERE = Path(__file__).parent
# No contraction of a product and a sum: Pillow's weights are rounded after each. A libjpeg that
# lies beside the library is found before the system's, so that both can be carried elsewhere.
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden",
    "-Wl,-rpath,$ORIGIN",
)  # fmt: skip
_LIBRARIES = ("-ljpeg", "-lm")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120
_INCLUDE_VARIABLES = ("CPATH", "C_INCLUDE_PATH")
_INCLUDE_FOLDERS = ("/usr/local/include", "/usr/include")
_PACKAGES = "install gcc and libjpeg-dev (Fedora: libjpeg-turbo-devel)"


class BuildError(PacelineError):
    """The library cannot be built here; cause and remedy."""


def build(target: Path, *flags: str) -> None:
    """With more `flags` for tests. BuildError where there is no compiler, no header, or no place to
    write to."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)})", _PACKAGES)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            built = Path(folder) / "library.so"
            _compile(compiler, built, flags)
            # Whatever the umask says: whoever could write to it could run code here.
            built.chmod(0o755)
            built.replace(target)
    except OSError as error:
        raise not_writable(target.parent, error) from None


def not_writable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"{folder} cannot be written ({error.strerror or error})",
        "set XDG_CACHE_HOME to a directory that can, or PACELINE_JPEG_REGION_LIBRARY to a built one",
    )


def _compile(compiler: str, target: Path, flags: Sequence[str]) -> None:
    sources = [str(HERE / name) for name in SOURCES]
    command = [*compiler.split(), *FLAGS, *flags, "-o", str(target), *sources, *_LIBRARIES]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run ({error})", _PACKAGES) from None
    if done.returncode == 0:
        return
    if refusal := re.search(r'error:? "([^"]+)"', done.stderr):  # an #error of our own
        raise BuildError(refusal[1], _PACKAGES)
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    if "jpeglib.h" in done.stderr or "-ljpeg" in done.stderr:
        raise BuildError("libjpeg-turbo's header or library is missing", _PACKAGES)
    why = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
    raise BuildError(f"{compiler} fails: {why[:200]}", _PACKAGES)


def cached_library(*, rebuild: bool = False) -> Path:
    """The library of this very source, built if it is not there yet. BuildError also where others
    could have put it there."""
    folder = _private_directory()
    code, place = _code_key(), _place_key()
    path = folder / f"jpeg_region-{code}-{place}.so"
    if rebuild or not path.exists():
        try:
            build(path)
        except BuildError:
            # One of the same code, built where there were headers; it is compared with Pillow yet.
            others = sorted(folder.glob(f"jpeg_region-{code}-*.so"))
            if rebuild or not others:
                raise
            path = others[0]
    _require_ours(path)
    return path


def _private_directory() -> Path:
    cache = user_cache()
    if cache is None:
        raise BuildError("there is no home directory to build in", "set XDG_CACHE_HOME")
    folder = cache / "region"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from None
    _require_ours(folder)
    return folder


def _require_ours(path: Path) -> None:
    """Whoever else could write it could run code here."""
    found = path.lstat()
    if found.st_uid not in (os.geteuid(), 0):
        why, remedy = "belongs to another user", "set XDG_CACHE_HOME to a directory of your own"
    elif stat.S_ISLNK(found.st_mode):
        why, remedy = "is a link", "remove it"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why, remedy = "can be written by others", f"remove it, or chmod go-w {path}"
    else:
        return
    raise BuildError(f"{path} {why}, so nothing is loaded from there", remedy)


def _code_key() -> str:
    digest = hashlib.sha256(repr((FLAGS, platform.machine())).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _place_key() -> str:
    """Not the compiler's version, nor which of the usual ones it is: a library outlives them."""
    digest = hashlib.sha256(os.environ.get("CC", "").encode())
    for header in _libjpeg_headers():
        digest.update(header.read_bytes())
    return digest.hexdigest()[:8]


def _libjpeg_headers() -> list[Path]:
    """`jconfig.h` names the version and how it was configured. All that a compiler may find,
    without asking one: it may have gone since."""
    named = [os.environ.get(name, "").split(os.pathsep) for name in _INCLUDE_VARIABLES]
    folders = [Path(name) for names in named for name in names if name]
    for name in _INCLUDE_FOLDERS:
        folders += [Path(name), *sorted(Path(name).glob("*-linux-*"))]
    return [path for folder in folders if (path := folder / "jconfig.h").is_file()]


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]).absolute())
    except (BuildError, IndexError) as failure:
        sys.exit(str(failure) if failure.args else "usage: build FILE")
