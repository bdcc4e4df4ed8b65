"""Damaged files for the tests of decoders, from good ones, as a function of a number.

In: good files and a number. Out: one of them with bits flipped, bytes set, a part cut out, doubled,
zeroed, reversed or taken from another file, its end cut off, or dimensions that are absurd.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def seed_files(side: int = 24) -> list[bytes]:
    """Tiny images in every form that training meets."""
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
    files = []
    for image, kind, options in plain:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        files.append(stream.getvalue())
    return files


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
    # Headers are a small part of a file, and where most can go wrong.
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
    """Dimensions in a JPEG's frame or a PNG's header that no test's memory would hold."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        at = data.find(marker)
        if at >= 0:
            data[at + 5 : at + 9] = generator.choice([b"\xff" * 4, b"\xff\xff\0\1", b"\0\0\0\5"])
            return
    if data[12:16] == b"IHDR":
        data[16:24] = generator.choice([b"\x7f\xff\xff\xff" * 2, b"\0" * 8])
