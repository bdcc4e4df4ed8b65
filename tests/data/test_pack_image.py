from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from paceline.data.decoding.decode import CorruptImage
from paceline.data.packing.pack_image import fitted, pack_image
from paceline.data.packing.pack_options import PackOptions

SMALLER = PackOptions(short_side=32)


def photo(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Smooth, so that JPEG and scaling change it little."""
    rows, columns = np.mgrid[0:height, 0:width]
    values = np.stack([rows * 3, columns * 2, rows + columns], axis=2).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def file_of(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_small_images_are_copied_byte_for_byte(kind: str) -> None:
    data = file_of(photo(), kind)
    packed = pack_image(data, PackOptions(short_side=40))
    assert packed.content is data
    assert packed.copied
    assert packed.extension == {"JPEG": "jpg"}.get(kind, kind.lower())


@pytest.mark.parametrize(
    ("kind", "mode", "kept"),
    [("JPEG", "RGB", "RGB"), ("JPEG", "L", "L"), ("JPEG", "CMYK", "RGB"), ("PNG", "RGBA", "RGB"),
     ("PNG", "P", "RGB"), ("PNG", "LA", "L"), ("PNG", "I;16", "L"), ("PNG", "1", "L"),
     ("WEBP", "RGB", "RGB")],
)  # fmt: skip
def test_large_ones_are_scaled_in_their_own_format(kind: str, mode: str, kept: str) -> None:
    packed = pack_image(file_of(photo(mode=mode), kind), SMALLER)
    assert not packed.copied
    with Image.open(io.BytesIO(packed.content)) as image:
        assert (image.format, image.mode, image.size) == (kind, kept, (48, 32))


def test_scaling_keeps_the_picture() -> None:
    packed = pack_image(file_of(photo(600, 400), "PNG"), PackOptions(short_side=40))
    wanted = np.asarray(photo(600, 400).resize((60, 40), Image.Resampling.BILINEAR), np.int64)
    with Image.open(io.BytesIO(packed.content)) as image:
        assert np.array_equal(np.asarray(image), wanted)


def test_turned_by_its_camera() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    packed = pack_image(file_of(photo(60, 40), exif=exif), SMALLER)
    with Image.open(io.BytesIO(packed.content)) as image:
        assert image.size == (32, 48)
        assert not image.getexif()


def test_quality_and_format() -> None:
    data = file_of(photo(600, 400), "PNG")
    low, high = (
        pack_image(data, PackOptions(short_side=200, format="jpeg", quality=q)) for q in (30, 95)
    )
    assert low.extension == high.extension == "jpg"
    assert len(low.content) < len(high.content)
    # Another format is another file, however small the image.
    assert not pack_image(file_of(photo(8, 8), "PNG"), PackOptions(format="jpeg")).copied
    assert pack_image(file_of(photo(8, 8)), PackOptions(format="jpeg")).copied


def test_pixels_and_foreign_formats_become_png(png: Callable[..., bytes]) -> None:
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    packed = pack_image(pixels, PackOptions())
    assert packed.extension == "png"
    with Image.open(io.BytesIO(packed.content)) as image:
        assert np.array_equal(np.asarray(image), pixels)
    grey = pack_image(pixels[:, :, :1], PackOptions())
    with Image.open(io.BytesIO(grey.content)) as image:
        assert image.mode == "L"
    assert pack_image(file_of(photo(8, 8), "BMP"), PackOptions()).extension == "png"


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_what_cannot_be_decoded_is_not_copied_either(damage: str) -> None:
    data = file_of(photo())
    data = {"cut": data[: len(data) // 2], "empty": b"", "text": b"hello"}[damage]
    with pytest.raises(CorruptImage):
        pack_image(data, PackOptions())


def test_a_side_that_the_format_cannot_hold() -> None:
    wide = Image.new("L", (20_000, 2))
    with pytest.raises(CorruptImage, match="cannot be written as WEBP"):
        pack_image(file_of(wide, "PNG"), PackOptions(format="webp"))


def test_sizes() -> None:
    assert fitted((500, 375), 256) == (341, 256)
    assert fitted((375, 500), 256) == (256, 341)
    assert fitted((256, 300), 256) == (256, 300)
    assert fitted((10, 9), 0) == (10, 9)
    assert fitted((10_000, 10), 5) == (5000, 5)


def test_a_camera_s_jpeg_with_two_pictures_stays_a_jpeg() -> None:
    data = file_of(photo(), "MPO", save_all=True, append_images=[photo(30, 20)])
    with Image.open(io.BytesIO(data)) as found:
        assert found.format == "MPO"
    packed = pack_image(data, PackOptions())
    assert (packed.extension, packed.content, packed.copied) == ("jpg", data, True)
    scaled = pack_image(data, PackOptions(short_side=10))
    with Image.open(io.BytesIO(scaled.content)) as found:
        assert (scaled.extension, found.format) == ("jpg", "JPEG")
