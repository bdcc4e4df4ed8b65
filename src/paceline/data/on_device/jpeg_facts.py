"""Which files a JPEG decoder on the device shows as Pillow would, how large they are, and of what kind.

In: a file's bytes. Out: a `JpegFile`, or None for everything that is to go through the host: other
formats, CMYK and RGB inside a JPEG, files turned by Exif, arithmetic or lossless coding, more than 8
bits, absurd sizes, files cut short. Only the segments before the first scan are looked at, which takes
microseconds.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

Bytes = bytes | memoryview
_START = b"\xff\xd8\xff"
_END = b"\xff\xd9"
# Baseline, extended sequential and progressive, with Huffman codes.
_TAKEN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_SCAN, _APP1, _ADOBE, _RESTART = 0xDA, 0xE1, 0xEE, 0xDD
_PROGRESSIVE = 0xC2
# Zero, start, end and number of lines: decoders differ in what they make of these before a scan.
_MISPLACED = frozenset({0x00, 0xD8, 0xD9, 0xDC})
_TELLING = _OTHER_FRAMES | {_APP1, _ADOBE}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
# Padding that some writers leave behind the end.
_TAIL_BYTES = 64
_MOST_PIXELS = 64_000_000
_ORIENTATION_TAG = 0x0112
_RGB_NAMES = b"RGB"


class JpegFile(NamedTuple):
    """`kind` is equal where the frames' ways of coding are: all but the size."""

    data: Bytes
    width: int
    height: int
    kind: bytes


def jpeg_file(data: Bytes) -> JpegFile | None:
    """The file, if it is one for the device."""
    if data[:3] != _START or _END not in bytes(data[-_TAIL_BYTES:]):
        return None
    try:
        return _before_the_scan(data)
    except (struct.error, IndexError):
        return None


def _before_the_scan(data: Bytes) -> JpegFile | None:
    place, found, restarts = 2, None, False
    while True:
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in _ALONE:
            place += 2
            continue
        if marker in _MISPLACED:
            return None
        length: int = struct.unpack_from(">H", data, place + 2)[0]
        if marker == _SCAN:
            return _at_the_scan(found, data[place + 4], restarts)
        restarts |= marker == _RESTART
        if marker in _TAKEN_FRAMES:
            if found is not None:  # one frame is what a JPEG has
                return None
            found = _frame(data, place + 4, marker)
            if found is None:
                return None
        elif marker in _TELLING and not _is_plain(
            marker, bytes(data[place + 4 : place + 2 + length])
        ):
            return None
        place += 2 + length


def _at_the_scan(found: JpegFile | None, components: int, restarts: bool) -> JpegFile | None:
    """JPEG engines take no file whose components come one after the other."""
    if found is None or (found.kind[0] != _PROGRESSIVE and components != len(found.kind) - 1):
        return None
    return found._replace(kind=found.kind + bytes([restarts]))


def _is_plain(marker: int, segment: bytes) -> bool:
    """Whether a segment leaves the pixels as everybody would take them."""
    if marker == _APP1:
        return _is_upright(segment)
    if marker == _ADOBE:
        # 1 is YCbCr, which is what three components are taken for.
        return not segment.startswith(b"Adobe") or segment[11] == 1
    return False


def _frame(data: Bytes, place: int, marker: int) -> JpegFile | None:
    bits, height, width, components = struct.unpack_from(">BHHB", data, place)
    if bits != 8 or components not in (1, 3) or not 0 < width * height <= _MOST_PIXELS:
        return None
    table = bytes(data[place + 6 : place + 6 + 3 * components])
    if len(table) < 3 * components or table[::3] == _RGB_NAMES:
        return None
    # Neither the components' names nor their quantisation tables make another kind.
    return JpegFile(data, width, height, bytes([marker]) + table[1::3])


def _is_upright(segment: bytes) -> bool:
    """Whether an APP1 segment leaves the image as it is; one that cannot be read does not."""
    if not segment.startswith(b"Exif\0\0"):
        return b"Orientation" not in segment  # XMP may have one too
    tiff = segment[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == _ORIENTATION_TAG:
                return bool(kind == 3 and value == 1)
    except struct.error:
        return False
    return True
