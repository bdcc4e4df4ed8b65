"""Fixtures of the region decoder: the library, and unusual JPEGs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.data import RegionUnavailableError, region_library
from paceline.data.decode.library import RegionLibrary

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library() -> RegionLibrary:
    try:
        return region_library()
    except RegionUnavailableError as error:
        pytest.skip(f"no region decoder here: {error}")


@pytest.fixture(scope="session")
def compiler(library: RegionLibrary) -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not found:
        pytest.skip("no C compiler; the library was named")
    return found


@pytest.fixture(scope="session")
def write_jpeg(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """A JPEG of pixels, with sampling, restarts, scans and colours that Pillow does not write."""
    target = tmp_path_factory.mktemp("write_jpeg") / "write_jpeg.so"
    source = HERE / "write_jpeg.c"
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", str(target), str(source), "-ljpeg"]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(target)).write_jpeg
    function.restype = ctypes.c_ulong
    function.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int] * 8, ctypes.c_char_p, ctypes.c_ulong,
    ]  # fmt: skip

    def write(
        pixels: np.ndarray,
        quality: int = 90,
        sampling: tuple[int, int] = (1, 1),
        restart: int = 0,
        flags: int = 0,
    ) -> bytes:
        height, width, bands = pixels.shape
        out = ctypes.create_string_buffer(pixels.size * 6 + 20_000)
        length = function(
            pixels.tobytes(), width, height, bands, quality, *sampling, restart, flags,
            out, len(out),
        )  # fmt: skip
        assert length, "libjpeg refuses"
        return out.raw[:length]

    return write
