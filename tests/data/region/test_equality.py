"""The region decoder's pixels are Pillow's, bit by bit, for every file that it takes."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.region.comparison import (
    ARITHMETIC,
    FEW_SCANS,
    PROGRESSIVE,
    SEPARATE_SCANS,
    STORE_RGB,
    Comparison,
)
from paceline.data import DataSettings, EvalTransform, TrainTransform
from paceline.data.augment import FitTransform
from paceline.data.decode.build import build
from paceline.data.decode.library import RegionLibrary
from paceline.data.settings import INTERPOLATIONS

Write = Callable[..., bytes]
SAMPLINGS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 1)]
IMAGENET = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "imagenet200"


def scene(width: int, height: int, bands: int, seed: int) -> np.ndarray:
    """Blocks of colour with noise over a part: edges of all kinds, and long codes."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (height // 5 + 1, width // 5 + 1, bands), dtype=np.uint8)
    pixels = np.repeat(np.repeat(coarse, 5, axis=0), 5, axis=1)[:height, :width].copy()
    noise = generator.integers(0, 256, pixels.shape, dtype=np.uint8)
    pixels[: height // 2, width // 3 :] = noise[: height // 2, width // 3 :]
    return pixels


def crops(size: int, interpolation: str, channels: int) -> TrainTransform:
    """Boxes down to a hundredth of the image."""
    return TrainTransform(
        DataSettings(
            image_size=size,
            eval_resize=0,
            channels=channels,
            interpolation=interpolation,
            crop_scale=(0.01, 1.0),
            mean=(0.5,),
            std=(0.5,),
        )
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_random_crops_of_every_kind_of_file(
    library: RegionLibrary, write_jpeg: Write, interpolation: str, bands: int, channels: int
) -> None:
    generator = np.random.default_rng(channels + 10 * bands)
    compared = taken = 0
    for number in range(280):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        flags = (0, PROGRESSIVE)[number // 7 % 2]
        width, height = (int(side) for side in generator.integers(1, (130, 110)[number % 2], 2))
        pixels = scene(width, height, bands, number)
        restart = (0, 0, 1, 3)[number % 4]
        quality = int(generator.integers(20, 100))
        data = write_jpeg(pixels, quality, sampling, restart, flags)
        transform = crops(int(generator.integers(1, 50)), interpolation, channels)
        comparison = Comparison(library, transform, channels)
        row = generator.random(transform.draws).tolist()
        assert comparison.agrees(data, row), (width, height, sampling, flags, restart)
        compared, taken = compared + 1, taken + comparison.taken
    # All but strips that are a hundred times as high as they are wide.
    assert taken >= compared - 5


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_evaluation_crops(library: RegionLibrary, write_jpeg: Write, interpolation: str) -> None:
    generator = np.random.default_rng(3)
    comparisons = []
    for number in range(150):
        width, height = (int(side) for side in generator.integers(1, 150, 2))
        data = write_jpeg(scene(width, height, 3, number), 90, SAMPLINGS[number % 4])
        size = int(generator.integers(1, 60))
        short = int(generator.integers(size, 2 * size + 1))
        comparison = Comparison(library, FitTransform(size, short, interpolation), 3)
        assert comparison.agrees(data), (width, height, size, short)
        comparisons.append(comparison)
    assert sum(c.taken for c in comparisons) >= 145


@pytest.mark.parametrize("augment", ["random_resized_crop", "pad_crop", "none"])
def test_every_augmentation(library: RegionLibrary, write_jpeg: Write, augment: str) -> None:
    chosen = DataSettings(image_size=16, eval_resize=0, augment=augment, cutout=5)
    comparison = Comparison(library, TrainTransform(chosen), 3)
    generator = np.random.default_rng(1)
    for number in range(40):
        side = (16, 21, 40)[number % 3]
        data = write_jpeg(scene(side, (side, 33)[number % 2], 3, number))
        assert comparison.agrees(data, generator.random(TrainTransform(chosen).draws).tolist())
    assert comparison.taken == 40


@pytest.mark.parametrize(
    ("flags", "taken"),
    [(STORE_RGB, 1), (STORE_RGB | PROGRESSIVE, 1), (ARITHMETIC, 0), (SEPARATE_SCANS, 0),
     (FEW_SCANS, 0)],
)  # fmt: skip
def test_rare_codings(library: RegionLibrary, write_jpeg: Write, flags: int, taken: int) -> None:
    data = write_jpeg(scene(70, 50, 3, 0), flags=flags)
    comparison = Comparison(library, FitTransform(20, 24, "bilinear"), 3)
    assert comparison.agrees(data)
    assert comparison.taken == taken


def test_without_vector_instructions(
    library: RegionLibrary, write_jpeg: Write, tmp_path: Path
) -> None:
    build(tmp_path / "portable.so", "-DREGION_PORTABLE")
    portable = RegionLibrary(tmp_path / "portable.so")
    generator = np.random.default_rng(8)
    for number in range(60):
        interpolation, channels = INTERPOLATIONS[number % 4], (1, 3)[number // 4 % 2]
        width, height = (int(side) for side in generator.integers(10, 90, 2))
        transform = crops(int(generator.integers(1, 40)), interpolation, channels)
        comparison = Comparison(portable, transform, channels)
        row = generator.random(transform.draws).tolist()
        pixels = scene(width, height, 3, number)
        assert comparison.agrees(write_jpeg(pixels), row)
        assert comparison.taken == 1
        pillow, region = comparison.both(pixels, row)
        assert np.array_equal(pillow, region)


def imagenet() -> list[bytes]:
    files = []
    for shard in sorted(IMAGENET.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if stream is not None and member.name.endswith((".jpg", ".jpeg", ".JPEG")):
                    files.append(stream.read())
    return files


def test_photographs(library: RegionLibrary) -> None:
    files = imagenet()
    if not files:
        pytest.skip("shared/data/imagenet200 is not here")
    train = Comparison(library, TrainTransform(DataSettings()), 3)
    evaluation = Comparison(library, EvalTransform(DataSettings()), 3)
    rows = np.random.default_rng(0).random((len(files), TrainTransform(DataSettings()).draws))
    for number, (data, row) in enumerate(zip(files, rows.tolist(), strict=True)):
        way, numbers = (train, row) if number % 3 else (evaluation, [])
        assert way.agrees(data, numbers), number
    assert train.taken + evaluation.taken == len(files)
