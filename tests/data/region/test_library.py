from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.small import encode, noise
from paceline.data import RegionUnavailableError, region_library
from paceline.data.decode import library as loading
from paceline.data.decode.build import cached_library
from paceline.data.decode.library import VARIABLE, RegionLibrary, disagreement


@pytest.fixture
def _anew() -> Iterator[None]:
    """Forgets what was found, before and after."""
    loading._load_checked.cache_clear()
    yield
    loading._load_checked.cache_clear()


def jpeg(width: int, height: int, **options: object) -> bytes:
    return encode(noise(width, height, width), "JPEG", **options)


def test_sizes(library: RegionLibrary) -> None:
    assert library.size(jpeg(40, 30)) == (40, 30)
    assert library.size(jpeg(40, 30)[:100]) is None
    assert library.size(b"") is None
    assert library.size(b"\xff\xd8\xff") is None
    assert library.size(jpeg(2, 201)) is None  # Pillow 12 resizes such strips in its own way


@pytest.mark.parametrize("orientation", [1, 2, 8, 9])
def test_turned_images_are_not_taken(library: RegionLibrary, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a camera"
    assert (library.size(jpeg(20, 10, exif=exif)) is not None) == (orientation == 1)


def test_metadata_that_may_turn_the_image(library: RegionLibrary) -> None:
    """The orientation of XMP applies if Exif has none."""
    xmp = b'<x tiff:Orientation="6"/>'
    assert library.size(jpeg(20, 10, xmp=b"<x/>")) is not None
    assert library.size(jpeg(20, 10, xmp=xmp)) is None
    exif = Image.Exif()
    exif[0x0112] = 1
    assert library.size(jpeg(20, 10, xmp=xmp, exif=exif)) is not None


@pytest.mark.parametrize("shape", [(8, 9, 3), (8, 8, 2)])
def test_results_that_are_no_square(library: RegionLibrary, shape: tuple[int, ...]) -> None:
    data, out = jpeg(20, 10), np.zeros(shape, dtype=np.uint8)
    if shape[0] != shape[1]:
        with pytest.raises(ValueError, match="contiguous, writable square"):
            library.prepare(data, (20, 10), (0, 0, 20, 10), False, "bilinear", out)
    else:
        assert not library.prepare(data, (20, 10), (0, 0, 20, 10), False, "bilinear", out)
    assert not out.any()


def test_threads_do_not_meet(library: RegionLibrary) -> None:
    files = [jpeg(30 + i, 90 - i) for i in range(24)]

    def prepared(data: bytes) -> np.ndarray:
        out = np.zeros((33, 33, 3), dtype=np.uint8)
        shape = library.size(data)
        assert shape is not None
        assert library.prepare(data, shape, (1.5, 2.5, 20.25, 30), True, "lanczos", out)
        return out

    want = [prepared(data) for data in files]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(10):
            for got, expected in zip(pool.map(prepared, files), want, strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("_anew")
def test_a_library_by_name(
    library: RegionLibrary, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(cached_library()))
    monkeypatch.setattr(loading, "cached_library", lambda **_: pytest.fail("built all the same"))
    assert region_library().version == library.version


def unavailable() -> RegionUnavailableError:
    with pytest.raises(RegionUnavailableError) as caught:
        region_library()
    return caught.value


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_name_that_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "x.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(VARIABLE, str(path))
    error = unavailable()
    assert error.cause.startswith(f"the library does not load ({path}")
    assert error.remedy == f"check {VARIABLE}"


@pytest.mark.usefixtures("_anew")
def test_one_that_was_mapped_already_is_really_another(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that was opened once means the old library for as long as the process lives."""
    source, path, good = tmp_path / "old.c", tmp_path / "library.so", cached_library()
    source.write_text(
        "int region_size, region_sizes, region_prepare, region_prepare_many, region_close;"
        "int region_read_many, region_square_of_pixels;"
        'const char *region_version(void) { return "old"; } void *region_open(void) { return 0; }'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)

    def choose(*, rebuild: bool = False) -> Path:
        if rebuild:
            shutil.copy(good, tmp_path / "new")
            (tmp_path / "new").replace(path)
        return path

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(loading, "cached_library", choose)
    with pytest.raises(OSError, match="built for another libjpeg"):
        RegionLibrary(path)
    assert region_library().size(jpeg(40, 30)) == (40, 30)
    assert set(tmp_path.iterdir()) == {source, path}


@pytest.mark.usefixtures("_anew")
def test_one_whose_pixels_differ_is_none(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "disagreement", lambda _: "its pixels differ")
    assert unavailable().cause == "its pixels differ"


# --- the comparison with Pillow ----------------------------------------------------------------


def test_this_library_agrees(library: RegionLibrary) -> None:
    assert disagreement(library) == ""


class Wrong:
    """Off by one level in one pixel, or unable, in one of its ways."""

    def __init__(self, library: RegionLibrary, way: str, name: str, able: bool = True) -> None:
        self.size, self.prepare, self.square = library.size, library.prepare, library.square
        self._right, self._name, self._able = getattr(library, way), name, able
        setattr(self, way, self._wrong)

    def _wrong(self, *given: Any) -> bool:
        done: bool = self._right(*given)
        *_, name, out = given
        if name == self._name:
            out[3, 4, -1] ^= 1
            return self._able
        return done


@pytest.mark.parametrize("way", ["prepare", "square"])
@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("able", [True, False])
def test_a_single_level_is_noticed(library: RegionLibrary, way: str, name: str, able: bool) -> None:
    said = disagreement(Wrong(library, way, name, able))  # type: ignore[arg-type]
    assert said.startswith("its pixels differ from those of Pillow")
    assert name in said


def test_the_order_of_the_passes_is_noticed(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pillow that orders them by a rule that we do not know must not go unnoticed."""
    rule = loading.down_first
    monkeypatch.setattr(loading, "down_first", lambda *given: not rule(*given))
    assert disagreement(library)
