"""Damaged files for the tests of decoders, from good ones, as a function of a number.

In: good files and a number. Out: one of them with bits flipped, bytes set, a part cut out, doubled,
zeroed, reversed or taken from another file, its end cut off, or dimensions that are absurd.
"""

from __future__ import annotations

import struct

import numpy as np
from PIL import Image

from data.small import encode

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


def mutated(files: list[bytes], number: int) -> bytes:
    generator = np.random.default_rng(number)
    data = bytearray(files[number % len(files)])
    for _ in range(int(generator.integers(1, 4))):
        _mutate(data, files, generator)
    return bytes(data)


def _mutate(data: bytearray, files: list[bytes], generator: np.random.Generator) -> None:
    length = len(data)
    if not length:
        return
    at = int(generator.integers(length))
    # Most errors are in headers, which are a small part of a file.
    at = at if generator.random() < 0.5 else at % min(length, 200)
    end = min(length, at + int(generator.integers(1, 40)))
    match int(generator.integers(9)):
        case 0:
            data[at] ^= 1 << int(generator.integers(8))
        case 1:
            data[at] = int(generator.choice([0, 1, 0x7F, 0x80, 0xD9, 0xDA, 0xFE, 0xFF]))
        case 2:
            del data[at:]
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end]
        case 5:
            data[at:end] = bytes(end - at)
        case 6:
            data[at:end] = data[at:end][::-1]
        case 7:
            other = files[int(generator.integers(len(files)))]
            start = int(generator.integers(len(other)))
            data[at:end] = other[start : start + end - at]
        case _:
            _make_absurd(data, generator)


def _make_absurd(data: bytearray, generator: np.random.Generator) -> None:
    """Sets dimensions that need more memory than a test has."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        at = data.find(marker)
        if at >= 0:
            data[at + 5 : at + 9] = generator.choice([b"\xff" * 4, b"\xff\xff\0\1", b"\0\0\0\5"])
            return
    if data[12:16] == b"IHDR":
        data[16:24] = generator.choice([b"\x7f\xff\xff\xff" * 2, b"\0" * 8])
