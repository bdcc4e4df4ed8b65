from __future__ import annotations

import pytest
import torch

from paceline.data import Normalizer

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    images = torch.arange(2 * 16 * 8 * 3).remainder(256).to(torch.uint8).view(2, 16, 8, 3)
    got = Normalizer(*IMAGENET, 3, dtype)(images, "cpu")
    assert torch.equal(got, Normalizer(*IMAGENET, 3)(images, "cpu").to(dtype))
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_compiles_whole() -> None:
    """A break in the graph, or one more for the second batch, would be an error here."""
    normalize = Normalizer(*IMAGENET, 3, torch.bfloat16)
    normalize.prepare("cpu")
    compiled = torch.compile(lambda x: normalize(x, "cpu"), fullgraph=True, backend="eager")
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    assert torch.equal(compiled(images), normalize(images, "cpu"))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(images.flip(0)), normalize(images.flip(0), "cpu"))


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8).pin_memory()
    got = Normalizer(*IMAGENET, 3)(images, "cuda")
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        got.cpu().double(), reference(images, *IMAGENET), rtol=1e-6, atol=1e-6
    )


@pytest.mark.gpu
def test_a_cuda_graph_holds_it() -> None:
    normalize = Normalizer(*IMAGENET, 3, torch.float16)
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8, device="cuda")
    normalize.prepare("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = normalize(images, "cuda")
    images.copy_(torch.randint(0, 256, images.shape, dtype=torch.uint8))
    graph.replay()
    assert torch.equal(got, normalize(images, "cuda"))


def test_empty_channels_and_either_memory_order() -> None:
    images = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8)
    plain = Normalizer((0.5,), (0.25,), 3)(images, "cpu")
    padded = Normalizer((0.5,), (0.25,), 3, channels_out=4)(images, "cpu")
    assert torch.equal(padded[:, :3], plain)
    assert not padded[:, 3].any()
    assert padded.is_contiguous(memory_format=torch.channels_last)
    planar = Normalizer((0.5,), (0.25,), 3, channels_last=False)(images, "cpu")
    assert torch.equal(planar, plain)
    assert planar.is_contiguous()
    with pytest.raises(ValueError, match="channels_out = 2 must not be"):
        Normalizer((0.5,), (0.25,), 3, channels_out=2)


def test_whole_lines_at_a_time_give_the_numbers_of_the_plain_operators() -> None:
    """Images cut from a larger tensor, which is not contiguous, give the same numbers."""
    normalize = Normalizer(*IMAGENET, 3)
    large = torch.randint(0, 256, (5, 150, 64, 3), dtype=torch.uint8)
    for images in (large, large[:, 3:70, 5:49]):
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        expected = pixels.mul(normalize._scale).add(normalize._shift)
        got = normalize(images, "cpu")
        assert torch.equal(got, expected)
        assert got.is_contiguous(memory_format=torch.channels_last)
