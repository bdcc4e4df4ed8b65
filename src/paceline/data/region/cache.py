"""Where the region decoder's library lies: once a user, source and libjpeg, in a cache of theirs.

In: XDG_CACHE_HOME or the home directory. Out: the path of a library that nobody else can have written.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

from paceline.data.region import build as building
from paceline.data.region.build import FLAGS, HEADERS, SOURCES, BuildError, not_writable

_INCLUDE_VARIABLES = ("CPATH", "C_INCLUDE_PATH")
_INCLUDE_FOLDERS = ("/usr/local/include", "/usr/include")


def cached_library(*, rebuild: bool = False) -> Path:
    """The library of this very source, built if it is not there yet. BuildError also where others could
    have put it there."""
    folder = _private_directory()
    code, place = _code_key(), _place_key()
    path = folder / f"jpeg_region-{code}-{place}.so"
    if rebuild or not path.exists():
        try:
            building.build(path)
        except BuildError:
            # One of the same code, built where there were headers; it is compared with Pillow yet.
            others = sorted(folder.glob(f"jpeg_region-{code}-*.so"))
            if rebuild or not others:
                raise
            path = others[0]
    _require_ours(path)
    return path


def _private_directory() -> Path:
    folder = _cache_home() / "paceline" / "region"
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
        digest.update((building.HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _place_key() -> str:
    """Not the compiler's version, nor which of the usual ones it is: a library outlives them."""
    digest = hashlib.sha256(os.environ.get("CC", "").encode())
    for header in _libjpeg_headers():
        digest.update(header.read_bytes())
    return digest.hexdigest()[:8]


def _libjpeg_headers() -> list[Path]:
    """`jconfig.h` names the version and how it was configured. All that a compiler may find, without
    asking one: it may have gone since."""
    named = [os.environ.get(name, "").split(os.pathsep) for name in _INCLUDE_VARIABLES]
    folders = [Path(name) for names in named for name in names if name]
    for name in _INCLUDE_FOLDERS:
        folders += [Path(name), *sorted(Path(name).glob("*-linux-*"))]
    return [path for folder in folders if (path := folder / "jconfig.h").is_file()]


def _cache_home() -> Path:
    """A relative XDG_CACHE_HOME counts as none, as its specification wants it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home at all
        raise BuildError("there is no home directory to build in", "set XDG_CACHE_HOME") from None
