from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from data.small import small_settings
from paceline.data import DataSettings, TrainTransform
from paceline.data.device import augment as module
from paceline.data.device.augment import AugmentNumbers, DeviceAugment
from paceline.data.device.resident import ResidentSet
from paceline.data.order import uniform

SAMPLES, BATCH = 30, 200


def held_noise(side: int, channels: int, device: str = "cpu") -> ResidentSet:
    pixels = torch.from_numpy(
        np.random.default_rng(0).integers(1, 256, (SAMPLES * side * side + 1, channels), np.uint8)
    )
    pixels[-1] = 0
    labels = torch.arange(SAMPLES)
    return ResidentSet(pixels.to(device), labels.to(device), (side, side, channels), {})


def both_ways(held: ResidentSet, chosen: DataSettings) -> tuple[np.ndarray, np.ndarray]:
    """The same samples with the same uniform numbers: one by one on the host, all on the device."""
    indices = np.arange(BATCH) * 7 % SAMPLES
    numbers = AugmentNumbers(chosen)
    rows = uniform(5, np.arange(BATCH), indices, numbers.draws)
    drawn = np.empty((numbers.count, BATCH), dtype=np.int64)
    numbers.fill(rows, drawn)
    there = [torch.from_numpy(a).to(held.device) for a in (indices, drawn)]
    got = DeviceAugment(held.pixels, chosen)(*there)
    transform = TrainTransform(chosen)
    want = np.empty(got.shape, dtype=np.uint8)
    for i, index in enumerate(indices.tolist()):
        pixels = held.images[index].cpu().numpy()
        image = Image.fromarray(pixels if held.shape[2] == 3 else pixels[..., 0])
        transform(image, rows[i].tolist(), want[i])
    return got.cpu().numpy(), want


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("augment", "padding"), [("none", 2), ("pad_crop", 2), ("pad_crop", 7)])
def test_shifts_and_flips_pixel_by_pixel(
    augment: str, padding: int, flip: bool, channels: int
) -> None:
    chosen = small_settings(augment=augment, flip=flip, crop_padding=padding, channels=channels)
    got, want = both_ways(held_noise(8, channels), chosen)
    assert np.array_equal(got, want)
    assert (got == 0).any() == (augment == "pad_crop")


@pytest.mark.parametrize("augment", ["none", "pad_crop"])
@pytest.mark.parametrize("cutout", [2, 3, 7])
def test_cutouts_pixel_by_pixel(augment: str, cutout: int) -> None:
    """Everywhere, whole or cut off by an edge; the other choices stay as they were."""
    chosen = small_settings(augment=augment, flip=True, cutout=cutout)
    got, want = both_ways(held_noise(8, 1), chosen)
    assert np.array_equal(got, want)
    whole, _ = both_ways(held_noise(8, 1), small_settings(augment=augment, flip=True))
    blank = ((got == 0) & (whole > 0))[..., 0]
    assert (got[~blank] == whole[~blank]).all()
    assert blank.sum(axis=(1, 2)).max() <= cutout**2
    if augment == "none":
        assert blank.any(axis=0).all()
        assert blank.sum(axis=(1, 2)).max() == cutout**2
        assert blank.sum(axis=(1, 2)).min() >= (cutout // 2) ** 2


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, held = small_settings(augment="pad_crop", flip=True), held_noise(8, 1)
    whole, _ = both_ways(held, chosen)
    for limit in (1, 64 * 8 * 33):
        monkeypatch.setattr(module, "_CHUNK_BYTES", limit)
        assert np.array_equal(both_ways(held, chosen)[0], whole)


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["none", "pad_crop"])
def test_on_the_gpu(augment: str) -> None:
    chosen = small_settings(augment=augment, flip=True, channels=3)
    got, want = both_ways(held_noise(8, 3, "cuda"), chosen)
    assert np.array_equal(got, want)
