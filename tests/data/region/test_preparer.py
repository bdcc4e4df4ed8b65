from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from paceline.data.augmentation.augment import FitTransform, TrainTransform
from paceline.data.decoding.decode import CorruptImage
from paceline.data.decoding.preparer import PillowPreparer
from paceline.data.region.library import RegionLibrary
from paceline.data.region.preparer import RegionPreparer
from paceline.data.settings import DataSettings

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
FIT = FitTransform(8, 8, "bilinear")


class Causes:
    def __init__(self) -> None:
        self.added: list[str] = []
        self.spent = {"decode": 0.0, "augment": 0.0}

    def add(self, cause: str, seconds: float) -> None:
        assert seconds > 0
        self.added.append(cause)
        self.spent[cause] += seconds


def encoded(kind: str, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "causes"),
    [
        (encoded("JPEG"), ["decode", "augment"]),
        (encoded("JPEG", "CMYK"), ["decode", "decode", "augment"]),  # the attempt counts too
        (encoded("PNG"), ["decode", "decode", "augment"]),
        (encoded("WEBP"), ["decode", "decode", "augment"]),
        (PIXELS, ["augment", "augment"]),
        (PIXELS[:, :, :1].copy(), ["augment", "augment"]),
        (PIXELS[:, ::2], ["augment", "decode", "augment"]),
    ],
)
def test_whatever_is_stored(
    library: RegionLibrary, data: bytes | np.ndarray, causes: list[str]
) -> None:
    """JPEGs and whole arrays by the library, all else by Pillow, with equal pixels."""
    clock, got, want = Causes(), np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)
    RegionPreparer(FIT, 3, library)(data, (), got, clock)
    PillowPreparer(FIT, 3)(data, (), want)
    np.testing.assert_array_equal(got, want)
    assert got.any()
    assert clock.added == causes


@pytest.mark.parametrize("data", [b"", b"no image", encoded("JPEG")[:-9]])
def test_corrupt_files_have_pillow_s_reason(library: RegionLibrary, data: bytes) -> None:
    out = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(CorruptImage) as pillow:
        PillowPreparer(FIT, 3)(data, (), out)
    with pytest.raises(CorruptImage) as region:
        RegionPreparer(FIT, 3, library)(data, (), out)
    assert str(region.value) == str(pillow.value)


def test_description(library: RegionLibrary) -> None:
    said = RegionPreparer(FIT, 3, library).describe()
    assert said == f"region decoder, {library.version}"


class SlowToFinish(FitTransform):
    def finish(self, row: Sequence[float], out: np.ndarray) -> None:
        time.sleep(0.05)


def test_what_is_done_to_the_square_is_augmenting(library: RegionLibrary) -> None:
    clock, out = Causes(), np.zeros((8, 8, 3), np.uint8)
    RegionPreparer(SlowToFinish(8, 8, "bilinear"), 3, library)(encoded("JPEG"), (), out, clock)
    assert clock.spent["augment"] > 0.04
    assert clock.spent["decode"] > 0


def test_pixels_are_finished_too(library: RegionLibrary) -> None:
    """Shifted, turned about, with a hole."""
    chosen = DataSettings(image_size=8, eval_resize=0, augment="pad_crop", crop_padding=2, cutout=3)
    transform = TrainTransform(chosen)
    for number in range(20):
        row = np.random.default_rng(number).random(transform.draws).tolist()
        got, want = np.zeros((2, 8, 8, 3), np.uint8)
        RegionPreparer(transform, 3, library)(PIXELS, row, got)
        PillowPreparer(transform, 3)(PIXELS, row, want)
        np.testing.assert_array_equal(got, want)


def test_samples_that_went_to_pillow_are_told(library: RegionLibrary) -> None:
    """From all threads; pixels that are not whole in memory too."""
    prepare = RegionPreparer(FIT, 3, library)
    jpeg, png = encoded("JPEG"), encoded("PNG")

    def fill(stored: bytes | np.ndarray) -> None:
        prepare(stored, (), np.zeros((8, 8, 3), np.uint8))

    fill(jpeg)
    assert prepare.remark() == ""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, [jpeg, png, PIXELS, PIXELS[:, ::2]] * 500))
    assert prepare.remark() == "1,000 of 2,001 samples went to Pillow, not the region decoder"
    assert PillowPreparer(FIT, 3).remark() == ""
