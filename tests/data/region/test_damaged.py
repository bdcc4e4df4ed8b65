"""Odd metadata and damaged files: pixels or a reason, the same with either decoder and every time."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import pytest

from data.region.comparison import Comparison
from data.region.mutations import (
    MAKER,
    ORIENTATION,
    PHOTOSHOP,
    RESOLUTION_UNIT,
    X_RESOLUTION,
    XMP,
    damaged,
    exif_segment,
    photoshop_segment,
    seed_files,
    with_segments,
)
from paceline.data import DataSettings, TrainTransform
from paceline.data.augment import FitTransform
from paceline.data.decode.library import RegionLibrary

TRANSFORM = TrainTransform(DataSettings(image_size=16, eval_resize=0))
ROWS = np.random.default_rng(0).random((101, TRANSFORM.draws)).tolist()
FIT = FitTransform(9, 9, "bilinear")
JPEG = seed_files()[0]
UPRIGHT, UNIT = (ORIENTATION, 3, 1, 1), (RESOLUTION_UNIT, 3, 1, 2)
ONE_BLOCK = photoshop_segment(0x0404, b"words")[1]


def check(library: RegionLibrary, data: bytes, taken: bool) -> None:
    """Compares pixels or error messages with Pillow's."""
    comparison = Comparison(library, FIT, 3)
    assert comparison.agrees(data)
    assert comparison.taken == taken


@pytest.mark.parametrize("end", [*range(14, len(ONE_BLOCK) + 1)])
def test_photoshop_s_blocks_cut_anywhere(library: RegionLibrary, end: int) -> None:
    """Blocks are ignored or complete in supported files. The last byte is padding."""
    whole = end >= len(ONE_BLOCK) - 1 or end < 18
    check(library, with_segments(JPEG, (PHOTOSHOP, ONE_BLOCK[:end])), whole)


@pytest.mark.parametrize(("size", "taken"), [(13, False), (14, True), (16, True)])
def test_photoshop_s_resolution(library: RegionLibrary, size: int, taken: bool) -> None:
    check(library, with_segments(JPEG, photoshop_segment(0x03ED, bytes(size))), taken)


def test_photoshop_s_sizes_that_overflow(library: RegionLibrary) -> None:
    segment = photoshop_segment(0x0404, b"words", size=0xFFFFFFFF)
    check(library, with_segments(JPEG, segment), False)


@pytest.mark.parametrize("kind", range(18))
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_resolution_of_another_type(library: RegionLibrary, kind: int, count: int) -> None:
    """Without JFIF's, Pillow takes Exif's, and fails at some types."""
    exif = exif_segment(
        (X_RESOLUTION, kind, count, 38), UNIT, extra=struct.pack("<4I", 72, 1, 72, 1)
    )
    check(library, with_segments(JPEG, exif, jfif=False), (kind, count) == (5, 1))


@pytest.mark.parametrize(("offset", "taken"), [(38, True), (39, False), (2**32 - 1, False)])
def test_an_offset_that_leads_outside(library: RegionLibrary, offset: int, taken: bool) -> None:
    """Pillow stops reading there: then Exif is silent on the orientation, and XMP counts."""
    exif = exif_segment((MAKER, 2, 9, offset), UPRIGHT, extra=b"a camera\0")
    check(library, with_segments(JPEG, exif, (1, XMP)), taken)


@pytest.mark.parametrize("segments", [[(1, XMP)], [exif_segment(UNIT), (1, XMP)]])
def test_what_xmp_says_counts_where_exif_is_silent(
    library: RegionLibrary, segments: list[tuple[int, bytes]]
) -> None:
    check(library, with_segments(JPEG, *segments), False)
    check(library, with_segments(JPEG, *segments, exif_segment(UPRIGHT)), len(segments) == 1)


# --- damaged files -----------------------------------------------------------------------------


def compare(library: RegionLibrary, numbers: range) -> Counter[str]:
    files, seen = seed_files(), Counter[str]()
    comparison = Comparison(library, TRANSFORM, 3)
    for number in numbers:
        data, row = damaged(files, number), ROWS[number % len(ROWS)]
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


def test_four_thousand(library: RegionLibrary) -> None:
    seen = compare(library, range(4_000))
    assert seen["pixels"] > 400
    assert seen["refused"] > 400
    assert seen.total() == 4_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_thousand(library: RegionLibrary) -> None:
    assert compare(library, range(4_000, 304_000)).total() == 300_000


def test_good_files_are_taken(library: RegionLibrary) -> None:
    """The decoder supports all JPEGs except the rotated one and CMYK."""
    taken = []
    for data in seed_files():
        comparison = Comparison(library, TRANSFORM, 3)
        assert comparison.agrees(data, ROWS[0])
        taken.append(comparison.taken)
    assert taken == [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_a_file_that_ends_too_soon_is_damaged_wherever_the_crop_lies(
    library: RegionLibrary,
) -> None:
    """Damage after the crop is detected, too, because Pillow detects it."""
    data = seed_files(90)[0]
    comparison = Comparison(library, TRANSFORM, 3)
    for cut in (1, 2, 5, 100):
        for row in ROWS[:20]:
            pillow, region = comparison.both(data[:-cut], row)
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
