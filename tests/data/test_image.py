from __future__ import annotations

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from data.small import encode
from paceline.data import CorruptImage
from paceline.data.image import decode

RED, BLUE = (250, 10, 20), (20, 30, 240)


def two_colours() -> Image.Image:
    """Red above blue, 6 wide and 4 high."""
    image = Image.new("RGB", (6, 4), RED)
    image.paste(BLUE, (0, 2, 6, 4))
    return image


def close(pixel: np.ndarray, colour: tuple[int, ...], tolerance: int = 0) -> bool:
    return bool((abs(pixel.astype(int) - np.array(colour)) <= tolerance).all())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colour_modes_of_png(mode: str) -> None:
    image = two_colours().convert(mode, palette=Image.Palette.ADAPTIVE)
    pixels = np.asarray(decode(encode(image), 3))
    assert pixels.shape == (4, 6, 3)
    assert close(pixels[0, 0], RED, 2)
    assert close(pixels[3, 5], BLUE, 2)


def test_transparent_palette() -> None:
    image = two_colours().convert("P", palette=Image.Palette.ADAPTIVE)
    data = encode(image, transparency=bytes([0, 128]))
    assert "transparency" in Image.open(io.BytesIO(data)).info
    assert close(np.asarray(decode(data, 3))[3, 5], BLUE, 2)
    assert decode(data, 1).mode == "L"


def test_transparency_is_dropped_not_blended() -> None:
    image = Image.new("RGBA", (2, 2), (*RED, 7))
    assert close(np.asarray(decode(encode(image), 3))[0, 0], RED)


@pytest.mark.parametrize(("mode", "colour"), [("L", 77), ("LA", (77, 3))])
def test_greyscale_to_colour_and_back(mode: str, colour: object) -> None:
    data = encode(Image.new(mode, (3, 2), colour))
    assert close(np.asarray(decode(data, 3))[0, 0], (77, 77, 77))
    grey = decode(data, 1)
    assert grey.mode == "L"
    assert np.asarray(grey).tolist() == [[77] * 3] * 2


def test_colour_to_greyscale() -> None:
    assert decode(encode(two_colours()), 1).mode == "L"
    assert np.asarray(decode(encode(two_colours()), 1))[0, 0] == round(
        0.299 * 250 + 0.587 * 10 + 0.114 * 20
    )


def test_sixteen_bits_keep_their_upper_byte() -> None:
    values = np.array([[0, 255, 256, 0x80FF, 65_535]], dtype=np.uint16)
    data = encode(Image.fromarray(values))
    assert np.asarray(decode(data, 1)).tolist() == [[0, 0, 1, 0x80, 255]]
    assert np.asarray(decode(data, 3))[0, 3].tolist() == [0x80] * 3


def test_cmyk_jpeg() -> None:
    data = encode(two_colours().convert("CMYK"), "JPEG", quality=100)
    pixels = np.asarray(decode(data, 3))
    assert close(pixels[0, 0], RED, 12)
    assert close(pixels[3, 5], BLUE, 12)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_content_decides_not_the_name(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = np.asarray(decode(encode(two_colours(), kind, **options), 3))
    assert close(pixels[0, 0], RED, 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind: str, orientation: int) -> None:
    """Each stored image is the upright one, turned the other way round by hand."""
    rng = np.random.default_rng(0)
    upright = np.kron(rng.integers(0, 2, (3, 2)) * 200 + 20, np.ones((8, 8))).astype(np.uint8)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif, quality=95)
    got = np.asarray(decode(data, 1)).astype(int)
    assert got.shape == upright.shape
    assert abs(got - upright).mean() < 6


def test_unreadable_metadata_does_not_spoil_the_pixels() -> None:
    """Warnings are errors here: a broken EXIF block neither warns nor fails."""
    for exif in (b"Exif\0\0MM\0*" + b"\xff" * 30, b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x12" * 40):
        data = encode(two_colours(), "JPEG", exif=exif, quality=95)
        assert decode(data, 3).size == (6, 4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated(kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(CorruptImage) as caught:
            decode(data[: int(len(data) * share)], 3)
        assert str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"II*\0 and more", "TIFF images are not supported: convert it to PNG"),
        (b"hello, world", r"not a JPEG, PNG, WebP, GIF or BMP image \(begins with 68 65 6c 6c\)"),
        (b"\x89PNG\r\n\x1a\n", "."),
    ],
)
def test_no_image(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptImage, match=reason):
        decode(data, 3)


def test_decompression_bomb() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(CorruptImage, match="bomb"):
        decode(data, 3)


def test_pillow_is_silent_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns about large images, also while other threads replace the list of filters."""
    data = encode(np.zeros((30, 30), dtype=np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with pytest.warns(Image.DecompressionBombWarning):
            Image.open(io.BytesIO(data))
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(decode, data, 1) for _ in range(60)]
            for future in futures:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    assert future.result().size == (30, 30)
    assert [str(w.message) for w in heard] == []
