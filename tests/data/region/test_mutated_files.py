"""Damaged files: every outcome is pixels or a reason, the same with either decoder and every time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data.region.comparison import Comparison
from data.region.mutations import mutated, seed_files
from paceline.data.augmentation.augment import TrainTransform
from paceline.data.region.library import RegionLibrary
from paceline.data.settings import DataSettings

TRANSFORM = TrainTransform(DataSettings(image_size=16, eval_resize=0))
ROWS = np.random.default_rng(0).random((101, TRANSFORM.draws)).tolist()


def compare(library: RegionLibrary, numbers: range) -> Counter[str]:
    files, seen = seed_files(), Counter[str]()
    comparison = Comparison(library, TRANSFORM, 3)
    for number in numbers:
        data, row = mutated(files, number), ROWS[number % len(ROWS)]
        pillow, region = comparison.both(data, row)
        if isinstance(pillow, str):
            assert region == pillow, number
            assert pillow
            seen["refused"] += 1
        else:
            assert not isinstance(region, str), (number, region)
            assert np.array_equal(pillow, region), number
            seen["pixels"] += 1
        if number % 10 == 0:
            again = comparison.both(data, row)
            assert np.all(again[0] == pillow), number
            assert np.all(again[1] == region), number
    return seen


def test_ten_thousand(library: RegionLibrary) -> None:
    seen = compare(library, range(10_000))
    assert seen["pixels"] > 1_000
    assert seen["refused"] > 1_000
    assert seen.total() == 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_thousand(library: RegionLibrary) -> None:
    assert compare(library, range(10_000, 310_000)).total() == 300_000


def test_good_files_are_taken(library: RegionLibrary) -> None:
    """Of the files to be damaged: all JPEGs but the turned one and CMYK."""
    taken = []
    for data in seed_files():
        comparison = Comparison(library, TRANSFORM, 3)
        assert comparison.agrees(data, ROWS[0])
        taken.append(comparison.taken)
    assert taken == [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_a_file_that_ends_too_soon_is_damaged_wherever_the_crop_lies(
    library: RegionLibrary,
) -> None:
    """Also where the missing end is not of the crop: Pillow would notice, so must we."""
    data = seed_files(90)[0]
    comparison = Comparison(library, TRANSFORM, 3)
    for cut in (1, 2, 5, 100):
        for row in ROWS[:20]:
            pillow, region = comparison.both(data[:-cut], row)
            assert isinstance(pillow, str)
            assert pillow.startswith("image file is truncated")
            assert region == pillow


def test_no_table_is_left_over_from_the_file_before(library: RegionLibrary) -> None:
    """A file without its second quantisation table, after one that has it."""
    good = seed_files()[2]
    second = good.index(b"\xff\xdb", good.index(b"\xff\xdb") + 2)
    bad = bytearray(good)
    bad[second + 4] = 0  # it now redefines the first
    comparison = Comparison(library, TRANSFORM, 3)
    for _ in range(2):
        assert comparison.agrees(good, ROWS[0])
        pillow, region = comparison.both(bytes(bad), ROWS[0])
        assert isinstance(pillow, str)
        assert region == pillow
