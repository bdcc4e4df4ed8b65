"""Image decoders: Pillow's way, the region decoder in C, and the header parser of the GPU's way."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data.region.mutations import seed_jpegs
from fuzz.target import MIB, Seed, Target
from paceline.data import (
    CorruptImage,
    DataSettings,
    EvalTransform,
    RegionUnavailableError,
    SyntheticImages,
    TrainTransform,
    region_library,
)
from paceline.data.decode.library import StoredFiles
from paceline.data.decode.region import RegionDecoder
from paceline.data.device.nvjpeg import jpeg_file
from paceline.data.image import decode, image_facts
from paceline.data.prefetch import Progress

# Pillow's own bound is 179 million pixels, at four bytes each, and a conversion holds two of them.
_IMAGE_MEMORY = 2048 * MIB


def image_targets() -> Sequence[Target]:
    return [
        Target("image pillow", _images(), _pillow, 20, (CorruptImage,), memory_bytes=_IMAGE_MEMORY),
        *_region_targets(),
        Target("image jpeg header", _jpegs(), _header, 8),
    ]


def _region_targets() -> Sequence[Target]:
    """Returns no targets without a compiler or libjpeg."""
    try:
        library = region_library()
    except RegionUnavailableError:
        return []
    settings = DataSettings(image_size=24, eval_resize=0)
    unused = SyntheticImages(count=1, classes=1, image_size=8, channels=3)
    decoders = [
        RegionDecoder(unused, transform(settings), library, channels=3)
        for transform in (TrainTransform, EvalTransform)
    ]
    out = np.zeros((24, 24, 3), dtype=np.uint8)

    def drive(content: bytes, name: str, folder: Path) -> None:
        """One by one, as errors are found, and in bulk, as most batches are decoded."""
        files = StoredFiles([memoryview(content), memoryview(content)])
        sizes = library.sizes(files)
        if sizes[0, 0]:
            boxes = np.array([[0, 0, *sizes[0]]] * 2, dtype=np.float32)
            turns = np.zeros((2, 2), dtype=np.int32)
            library.prepare_many(files, boxes, turns, "bilinear", [out, out.copy()])
        for number, decoder in enumerate(decoders):
            row = np.random.default_rng(len(content) + number).random(decoder.draws).tolist()
            decoder.prepare(content, row, out, Progress())

    return [
        Target("image region", _jpegs(), drive, 20, (CorruptImage,), memory_bytes=_IMAGE_MEMORY)
    ]


def _pillow(content: bytes, name: str, folder: Path) -> None:
    image_facts(content)
    with contextlib.suppress(CorruptImage):
        decode(content, 1)
    decode(content, 3)


def _header(content: bytes, name: str, folder: Path) -> None:
    found = jpeg_file(content)
    assert found is None or (found.width > 0 and found.height > 0)


def _pixels(side: int, bands: int) -> np.ndarray:
    shape = (side, side + 9, bands) if bands > 1 else (side, side + 9)
    smooth = np.add.outer(np.arange(side), np.arange(side + 9)) % 256
    noise = np.random.default_rng(bands).integers(0, 40, shape)
    return (
        ((smooth[..., None] if bands > 1 else smooth) * 0.8 + noise).clip(0, 255).astype(np.uint8)
    )


def _encoded(form: str, bands: int = 3, side: int = 40, **options: object) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(_pixels(side, bands))
    if form == "GIF":
        image = image.convert("P")
    image.save(stream, form, **options)
    return stream.getvalue()


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = orientation, "a description"
    return exif.tobytes()


def _jpegs() -> list[Seed]:
    return [Seed(f"{i}.jpg", content) for i, content in enumerate(seed_jpegs(40))]


def _images() -> list[Seed]:
    deep = io.BytesIO()
    Image.fromarray(_pixels(30, 1).astype(np.uint16) * 200).save(deep, "PNG")
    made = {
        "a.png": _encoded("PNG"),
        "b.png": _encoded("PNG", bands=4),
        "c.png": _encoded("PNG", bands=1, exif=_exif(3)),
        "d.png": deep.getvalue(),
        "a.webp": _encoded("WEBP", quality=70),
        "b.webp": _encoded("WEBP", bands=4, lossless=True, exif=_exif(8)),
        "a.gif": _encoded("GIF", bands=1),
        "a.bmp": _encoded("BMP"),
        "b.bmp": _encoded("BMP", bands=1),
    }
    return [Seed(name, content) for name, content in made.items()] + _jpegs()[:6]
