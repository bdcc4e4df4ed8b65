from __future__ import annotations

import numpy as np
import pytest

from paceline.data.region import library as loading
from paceline.data.region.agreement import disagreement
from paceline.data.region.library import RegionLibrary


def test_this_library_agrees(library: RegionLibrary) -> None:
    assert disagreement(library) == ""


class Wrong:
    """Off by one level in one pixel, or unable."""

    def __init__(self, library: RegionLibrary, name: str, able: bool = True) -> None:
        self._library, self._name, self._able = library, name, able
        self.size = library.size

    def prepare(self, *given: object) -> bool:
        done = self._library.prepare(*given)  # type: ignore[arg-type]
        *_, name, out = given
        if name == self._name:
            assert isinstance(out, np.ndarray)
            out[3, 4, 1] ^= 1
            return self._able
        return done


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("able", [True, False])
def test_a_single_level_is_noticed(library: RegionLibrary, name: str, able: bool) -> None:
    said = disagreement(Wrong(library, name, able))  # type: ignore[arg-type]
    assert said.startswith("its pixels differ from those of Pillow")
    assert name in said


def test_the_order_of_the_passes_is_noticed(
    library: RegionLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pillow that orders them by a rule that we do not know must not go unnoticed."""
    rule = loading.down_first
    monkeypatch.setattr(loading, "down_first", lambda *given: not rule(*given))
    assert disagreement(library)
