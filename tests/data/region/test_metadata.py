"""Metadata that Pillow acts upon, or fails at, as it opens a file: then the file is Pillow's."""

from __future__ import annotations

import struct

import pytest

from data.region.comparison import Comparison
from data.region.mutations import (
    MAKER,
    ORIENTATION,
    PHOTOSHOP,
    RESOLUTION_UNIT,
    X_RESOLUTION,
    XMP,
    exif_segment,
    photoshop_segment,
    seed_files,
    with_segments,
)
from paceline.data.augmentation.augment import FitTransform
from paceline.data.region.library import RegionLibrary

FIT = FitTransform(9, 9, "bilinear")
JPEG = seed_files()[0]
UPRIGHT, UNIT = (ORIENTATION, 3, 1, 1), (RESOLUTION_UNIT, 3, 1, 2)
ONE_BLOCK = photoshop_segment(0x0404, b"words")[1]


def check(library: RegionLibrary, data: bytes, taken: bool) -> None:
    """The same pixels or words as Pillow's, whoever decodes."""
    comparison = Comparison(library, FIT, 3)
    assert comparison.agrees(data)
    assert comparison.taken == taken


@pytest.mark.parametrize("end", [*range(14, len(ONE_BLOCK) + 1)])
def test_photoshop_s_blocks_cut_anywhere(library: RegionLibrary, end: int) -> None:
    """Taken once whole (the last byte pads), and where not even the signature is. Pillow fails where a
    name's length is missing."""
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
