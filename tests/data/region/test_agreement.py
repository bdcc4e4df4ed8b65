from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.data.region import library as loading
from paceline.data.region.agreement import disagreement
from paceline.data.region.library import RegionLibrary


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


def sampling(data: bytes) -> int:
    """Of luma, in a baseline file; 0 in others."""
    frame = data.find(b"\xff\xc0")
    return data[frame + 11] if frame >= 0 else 0


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda data, flip, out: flip and out.shape[2] == 3,
        lambda data, flip, out: flip and out.shape[2] == 1,
        lambda data, flip, out: out.shape[2] == 1 and sampling(data) == 0x22,
        lambda data, flip, out: sampling(data) == 0x12,
        lambda data, flip, out: b"\xff\xc2" in data,
        lambda data, flip, out: b"\xff\xc0\0\x0b" in data and out.shape[2] == 3,
    ],
    ids=["flipped", "flipped, one channel", "one channel", "4:4:0", "progressive", "grey"],
)
def test_every_kind_of_file_and_result_is_looked_at(
    library: RegionLibrary, is_wrong: Callable[..., bool]
) -> None:
    class WrongForSome:
        size, square = staticmethod(library.size), staticmethod(library.square)

        def prepare(self, data: bytes, shape: object, box: object, flip: bool, *rest: Any) -> bool:
            done = library.prepare(data, shape, box, flip, *rest)  # type: ignore[arg-type]
            rest[-1][3, 4, -1] ^= bool(is_wrong(data, flip, rest[-1]))
            return done

    assert disagreement(WrongForSome())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda bands, flip, channels: flip and channels == 3,
        lambda bands, flip, channels: flip and channels == 1,
        lambda bands, flip, channels: bands == 3 and channels == 1,
        lambda bands, flip, channels: bands == 1 and channels == 3,
    ],
    ids=["flipped", "flipped, one channel", "colour to grey", "grey to colour"],
)
def test_every_kind_of_pixels_is_looked_at(
    library: RegionLibrary, is_wrong: Callable[..., bool]
) -> None:
    class WrongForSome:
        size, prepare = staticmethod(library.size), staticmethod(library.prepare)

        def square(self, pixels: Any, box: Any, flip: bool, name: str, out: Any) -> bool:
            done = library.square(pixels, box, flip, name, out)
            out[3, 4, -1] ^= bool(is_wrong(pixels.shape[2], flip, out.shape[2]))
            return done

    assert disagreement(WrongForSome())  # type: ignore[arg-type]


def test_the_order_of_the_passes_is_noticed(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pillow that orders them by a rule that we do not know must not go unnoticed."""
    rule = loading.down_first
    monkeypatch.setattr(loading, "down_first", lambda *given: not rule(*given))
    assert disagreement(library)
