"""Builds the C library of `RegionDecoder`, which decodes crops of JPEGs, in the user's cache.

A C compiler builds a shared library from the C files in this directory and links libjpeg-turbo.
Every Python version can load the library. The cache is `$XDG_CACHE_HOME/paceline/region` or
`~/.cache/paceline/region`; only the user may write to that directory. The library is written under
a temporary name and renamed, so processes that build at the same time do not disturb each other.

`python -m paceline.data.decode.build FILE` builds a library to copy to another machine.
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
# No fused multiply-add, because Pillow rounds each product. The library prefers a libjpeg in its own
# folder, so that both files can be copied to another machine.
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden",
    "-Wl,-rpath,$ORIGIN",
)  # fmt: skip
_LIBRARIES = ("-ljpeg", "-lm")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120
_PACKAGES = "install gcc and libjpeg-dev (Fedora: libjpeg-turbo-devel)"


class BuildError(PacelineError):
    """Raised if the library cannot be built on this machine. Contains the cause and the remedy."""


def build(target: Path, *flags: str) -> None:
    """Compiles the library of the region decoder.

    Args:
        target: The file to write.
        flags: Additional compiler flags.

    Raises:
        BuildError: If there is no compiler, no libjpeg-turbo, or no permission to write.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)})", _PACKAGES)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            built = Path(folder) / "library.so"
            _compile(compiler, built, flags)
            # Regardless of the umask: a user who may write the file could run code in this process.
            built.chmod(0o755)
            built.replace(target)
    except OSError as error:
        raise _not_writable(target.parent, error) from None


def _not_writable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"{folder} cannot be written ({error.strerror or error})",
        "set XDG_CACHE_HOME to a writable directory, or PACELINE_JPEG_REGION_LIBRARY to a built library",
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
    if refusal := re.search(r'error:? "([^"]+)"', done.stderr):  # an #error in our sources
        raise BuildError(refusal[1], _PACKAGES)
    if "jpeglib.h" in done.stderr or "-ljpeg" in done.stderr:
        raise BuildError("libjpeg-turbo's header or library is missing", _PACKAGES)
    lines = done.stderr.splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    why = (errors or lines or [f"exit code {done.returncode}"])[0]
    raise BuildError(f"{compiler} fails: {why[:200]}", _PACKAGES)


def cached_library(*, rebuild: bool = False) -> Path:
    """Returns the path of the library built from the current C sources, and builds it if needed.

    Args:
        rebuild: Builds the library even if the cache contains it.

    Raises:
        BuildError: If the library cannot be built, or if another user could have written the file.
    """
    folder = _private_directory()
    path = folder / f"jpeg_region-{_key()}.so"
    if rebuild or not path.exists():
        build(path)
    _require_private(path)
    return path


def _private_directory() -> Path:
    cache = user_cache()
    if cache is None:
        raise BuildError("there is no home directory to build in", "set XDG_CACHE_HOME")
    folder = cache / "region"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from None
    _require_private(folder)
    return folder


def _require_private(path: Path) -> None:
    """Raises BuildError if another user may write `path`: loading it could run that user's code."""
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        why, remedy = "belongs to another user", "set XDG_CACHE_HOME to a directory of your own"
    elif stat.S_ISLNK(status.st_mode):
        why, remedy = "is a link", "remove it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why, remedy = "can be written by others", f"remove it, or chmod go-w {path}"
    else:
        return
    raise BuildError(f"{path} {why}, so it is not loaded", remedy)


def _key() -> str:
    digest = hashlib.sha256(repr((FLAGS, platform.machine())).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]).absolute())
    except (BuildError, IndexError) as failure:
        sys.exit(str(failure) if failure.args else "usage: build FILE")
