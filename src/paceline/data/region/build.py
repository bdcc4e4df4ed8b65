"""Builds the region decoder's library.

In: the C files beside this one, a compiler and libjpeg-turbo's headers. Out: a shared library, which
every Python version loads. It is written under a name of its own and then renamed, so processes that
build at the same time do no harm. `python -m paceline.data.region.build FILE` builds one to carry
elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError

SOURCES = (
    "metadata.c", "jpeg_header.c", "weights.c", "resample.c", "memory.c", "square.c",
    "jpeg_region.c", "pixels.c", "many.c", "read_many.c",
)  # fmt: skip
HEADERS = ("region.h", "state.h")
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


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]).absolute())
    except (BuildError, IndexError) as failure:
        sys.exit(str(failure) if failure.args else "usage: build FILE")
