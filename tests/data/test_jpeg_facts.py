from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.on_device.jpeg_facts import jpeg_file


def jpeg(mode: str = "RGB", size: tuple[int, int] = (21, 13), **options: Any) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "L"},
        {"progressive": True},
        {"subsampling": "4:4:4"},
        {"optimize": True, "comment": b"words"},
        {"exif": exif(1)},
        {"size": (1, 1)},
        {"restart_marker_blocks": 2},
    ],
)
def test_what_the_device_takes(options: dict[str, Any]) -> None:
    data = jpeg(**options)
    for form in (data, memoryview(data)):
        found = jpeg_file(form)
        assert found is not None
        assert (found.width, found.height) == options.get("size", (21, 13))
        assert found.data is form
    assert jpeg_file(data + b"\0" * 8) is not None


def test_kinds_tell_codings_apart_and_no_sizes() -> None:
    def kind(**options: Any) -> bytes:
        found = jpeg_file(jpeg(**options))
        assert found is not None
        return found.kind

    assert kind() == kind(size=(300, 200)) == kind(comment=b"words")
    others = [
        kind(), kind(mode="L"), kind(progressive=True), kind(subsampling="4:4:4"),
        kind(restart_marker_blocks=2),
    ]  # fmt: skip
    assert len(set(others)) == 5


def test_what_decoders_might_see_otherwise_goes_through_the_host() -> None:
    whole = jpeg()
    scan, frame = whole.index(b"\xff\xda"), whole.index(b"\xff\xc0")
    assert whole[scan + 4] == 3
    one_by_one = whole[: scan + 4] + b"\x01" + whole[scan + 5 :]
    assert jpeg_file(one_by_one) is None
    for marker in (b"\x00", b"\xd8", b"\xd9", b"\xdc"):
        hidden = b"\xff" + marker + b"\x00\x08" + b"\xff\xc0\xff\xff\xff\xff"
        assert jpeg_file(whole[:frame] + hidden + whole[frame:]) is None


@pytest.mark.parametrize("orientation", range(2, 9))
def test_what_exif_turns_goes_through_the_host(orientation: int) -> None:
    assert jpeg_file(jpeg(exif=exif(orientation))) is None


def test_so_does_everything_unusual() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    whole = jpeg()
    frame = whole.index(b"\xff\xc0")
    lossless = whole[: frame + 1] + b"\xc3" + whole[frame + 2 :]
    arithmetic = whole[: frame + 1] + b"\xc9" + whole[frame + 2 :]
    deep = whole[: frame + 4] + b"\x0c" + whole[frame + 5 :]
    huge = whole[: frame + 5] + b"\xff\xff\xff\xff" + whole[frame + 9 :]
    xmp = whole[:2] + b"\xff\xe1\x00\x2chttp://ns.adobe.com/xap tiff:Orientation=3 ..." + whole[2:]
    for data in (
        b"", b"\xff\xd8", stream.getvalue(), jpeg("CMYK"), jpeg(keep_rgb=True), whole[:-40],
        whole[: frame + 3] + b"\xff\xd9", lossless, arithmetic, deep, huge, xmp,
    ):  # fmt: skip
        assert jpeg_file(data) is None


def test_any_bytes_are_answered() -> None:
    draw, whole = np.random.default_rng(2), jpeg(exif=exif(1))
    answers = set()
    for _ in range(3000):
        damaged = bytearray(whole)
        for place in draw.integers(2, 300, 3):
            damaged[place] = draw.integers(256)
        answers.add(jpeg_file(bytes(damaged)) is None)
    assert answers == {True, False}
