"""Damaged files for the tests of decoders, from good ones, as a function of a number.

In: good files and a number. Out: one of them after mutations of `fuzz.mutate`, or with dimensions that
are absurd.
"""

from __future__ import annotations

import random
import struct

import numpy as np
from PIL import Image

from data.small import encode
from fuzz.mutate import mutate_bytes

PHOTOSHOP = 13
XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
ORIENTATION, X_RESOLUTION, RESOLUTION_UNIT, MAKER = 0x0112, 0x011A, 0x0128, 0x010F


def with_segments(jpeg: bytes, *segments: tuple[int, bytes], jfif: bool = True) -> bytes:
    """Inserts application segments after the JFIF segment, or in its place without `jfif`."""
    end = 4 + int.from_bytes(jpeg[4:6], "big")
    added = b"".join(
        bytes([0xFF, 0xE0 + kind]) + (len(data) + 2).to_bytes(2, "big") + data
        for kind, data in segments
    )
    return jpeg[: end if jfif else 2] + added + jpeg[end:]


def exif_segment(*entries: tuple[int, int, int, int], extra: bytes = b"") -> tuple[int, bytes]:
    """Returns an Exif segment with entries (tag, type, count, value or offset), followed by `extra`."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    directory = struct.pack("<H", len(entries)) + packed + bytes(4)
    return 1, b"Exif\0\0II*\0\x08\0\0\0" + directory + extra


def photoshop_segment(code: int, data: bytes, size: int | None = None) -> tuple[int, bytes]:
    """Returns a segment with one block, whose header claims `size` bytes."""
    head = b"Photoshop 3.0\x008BIM" + struct.pack(
        ">HBBI", code, 0, 0, len(data) if size is None else size
    )
    return PHOTOSHOP, head + data + bytes(len(data) % 2)


def seed_files(side: int = 24) -> list[bytes]:
    """Returns tiny images of all kinds that training reads."""
    generator = np.random.default_rng(5)
    small = generator.integers(0, 256, (6, 7, 3), dtype=np.uint8)
    colour = Image.fromarray(small).resize((side, side - 3), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain: list[tuple[Image.Image, str, dict[str, object]]] = [
        (colour, "JPEG", {"subsampling": 0}),
        (colour, "JPEG", {"subsampling": 1}),
        (colour, "JPEG", {"subsampling": 2, "restart_marker_blocks": 1}),
        (colour, "JPEG", {"progressive": True}),
        (colour, "JPEG", {"exif": exif}),
        (colour, "JPEG", {"icc_profile": b"profile" * 9, "comment": b"made for a test"}),
        (colour.convert("L"), "JPEG", {}),
        (colour.convert("CMYK"), "JPEG", {}),
        (colour, "PNG", {}),
        (colour.convert("P"), "PNG", {}),
        (colour.convert("LA"), "PNG", {}),
    ]
    files = [encode(image, kind, **options) for image, kind, options in plain]
    return files + _with_metadata(files[0])


def _with_metadata(jpeg: bytes) -> list[bytes]:
    """Returns copies of a JPEG with metadata that Pillow reads when it opens a file."""
    upright = (ORIENTATION, 3, 1, 1)
    resolution = exif_segment(
        upright,
        (X_RESOLUTION, 5, 1, 50),
        (RESOLUTION_UNIT, 3, 1, 2),
        extra=bytes([72, 0, 0, 0] * 2),
    )
    maker = exif_segment((MAKER, 2, 9, 38), upright, extra=b"a camera\0")
    return [
        with_segments(
            jpeg, photoshop_segment(0x0404, b"words"), photoshop_segment(0x03ED, bytes(16))
        ),
        with_segments(jpeg, resolution, jfif=False),
        with_segments(jpeg, maker, (1, XMP)),
    ]


def damaged(files: list[bytes], number: int) -> bytes:
    rng = random.Random(number)
    data = mutate_bytes(rng, files[number % len(files)], files)
    return data if rng.random() < 0.8 else _with_absurd_size(data, rng)


def _with_absurd_size(data: bytes, rng: random.Random) -> bytes:
    """Sets dimensions that need more memory than a test has."""
    for marker, offset in ((b"\xff\xc0", 5), (b"\xff\xc2", 5), (b"IHDR", 4)):
        at = data.find(marker) + offset
        if at >= offset:
            size = rng.choice((b"\xff" * 4, b"\xff\xff\0\1", b"\0\0\0\5"))
            return data[:at] + size + data[at + 4 :]
    return data


def seed_jpegs(side: int) -> list[bytes]:
    return [data for data in seed_files(side) if data.startswith(b"\xff\xd8")]
