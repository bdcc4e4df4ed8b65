from __future__ import annotations

import pytest
import torch

from paceline.data.normalize import Normalizer

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def reference(
    images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> torch.Tensor:
    pixels = images.permute(0, 3, 1, 2).double() / 255
    shape = (1, -1, 1, 1)
    return (pixels - torch.tensor(mean).double().view(shape)) / torch.tensor(std).double().view(
        shape
    )


@pytest.mark.parametrize(
    ("mean", "std", "channels"), [(*IMAGENET, 3), ((0.5,), (0.25,), 3), ((0.286,), (0.353,), 1)]
)
def test_equals_the_formula(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> None:
    images = torch.arange(2 * 16 * 8 * channels).remainder(256).to(torch.uint8)
    images = images.view(2, 16, 8, channels)
    before = images.clone()
    got = Normalizer(mean, std, channels)(images, "cpu")
    assert got.dtype == torch.float32
    assert got.shape == (2, channels, 16, 8)
    torch.testing.assert_close(got.double(), reference(images, mean, std), rtol=1e-6, atol=1e-6)
    assert torch.equal(images, before)


def test_memory_is_channels_last() -> None:
    got = Normalizer(*IMAGENET, 3)(torch.zeros(2, 5, 4, 3, dtype=torch.uint8), torch.device("cpu"))
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert not got.is_contiguous()


def test_wrong_number_of_values() -> None:
    with pytest.raises(ValueError, match="mean has 3 values for 1 channels"):
        Normalizer(*IMAGENET, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8).pin_memory()
    got = Normalizer(*IMAGENET, 3)(images, "cuda")
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        got.cpu().double(), reference(images, *IMAGENET), rtol=1e-6, atol=1e-6
    )
