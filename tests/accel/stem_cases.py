"""Cases of the kernel of image windows that `test_stem.py` runs in its own process, in Triton's
interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from accel.forms import use_forms
from accel.window_reference import CASES, convolution, form_of, windows_of
from paceline.accel import stem_kernels
from paceline.accel.stem import convolve_images
from paceline.models import AlexNet, alexnet
from paceline.models.alexnet import NORM_NAMES
from paceline.models.resnet import BasicBlock, FastResNet, ResNet


def padded(images: Tensor) -> Tensor:
    wide = F.pad(images, (0, 0, 0, 0, 0, 1))
    return wide.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The windows that a test makes."""
    windows: list[Tensor] = []
    image_windows = stem_kernels.image_windows

    def recorded(*given: object) -> Tensor:
        windows.append(image_windows(*given))  # type: ignore[arg-type]
        return windows[-1]

    monkeypatch.setattr(stem_kernels, "image_windows", recorded)
    return windows


@pytest.mark.parametrize("elements", [stem_kernels.ELEMENTS, 256])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "size"), CASES, ids=str)
def test_the_windows_of_images(
    name: str, size: tuple[int, int], kind: torch.dtype, elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stem_kernels, "ELEMENTS", elements)
    form = form_of(convolution(name))
    images = torch.randn(3, 3, *size).to(kind)
    down, across = (form.windows(pixels) for pixels in size)
    found = stem_kernels.image_windows(padded(images), form, down, across)
    assert found.is_contiguous(memory_format=torch.channels_last)
    wanted = windows_of(F.pad(images, (0, 0, 0, 0, 0, form.channels - 3)), form)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("name", "size"), CASES[::2], ids=str)
def test_a_first_convolution(
    name: str, size: tuple[int, int], biased: bool, made: list[Tensor]
) -> None:
    torch.manual_seed(0)
    layer = convolution(name).double()
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    # Neither the memory format nor a gap in memory matters.
    for given in (padded(images), F.pad(images, (0, 0, 0, 0, 0, 2))[:, :4]):
        found = convolve_images(layer, given, padded=True, biased=biased)
        wanted = layer(images) if biased else layer(images) - layer.bias.view(-1, 1, 1)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
        slope = torch.randn_like(wanted)
        parameters = (layer.weight, layer.bias) if biased else (layer.weight,)
        for ours, theirs in zip(
            torch.autograd.grad(found, parameters, slope),
            torch.autograd.grad(wanted, parameters, slope),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert len(made) == 2


def test_images_that_need_a_gradient(made: list[Tensor]) -> None:
    layer = convolution("small").double()
    images = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    given = padded(images).requires_grad_()
    convolve_images(layer, given, padded=True).square().sum().backward()
    plain = images.requires_grad_()
    layer(plain).square().sum().backward()
    torch.testing.assert_close(given.grad[:, :3], plain.grad)
    assert not made


def test_images_that_the_kernel_does_not_fit_raise_torchs_error(made: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match="[Kk]ernel size"):
        convolve_images(convolution("alexnet"), torch.zeros(1, 4, 6, 30), padded=True)
    none = convolve_images(convolution("alexnet"), torch.zeros(0, 4, 30, 30), padded=True)
    assert none.shape == (0, 6, 6, 6)
    assert not made


def networks() -> list[tuple[nn.Module, int, tuple[int, ...]]]:
    """Returns nets with the size of their images and the shape of their windows."""
    small = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, stem="small")
    return [
        (AlexNet(num_classes=3, norms=NORM_NAMES), 67, (64, 18, 18)),
        (small, 9, (32, 9, 9)),
        (FastResNet(num_classes=3, channels=(4, 4, 4, 4)), 10, (32, 10, 10)),
    ]


def test_evaluation_of_networks(made: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)
    torch.manual_seed(0)
    for net, size, shape in networks():
        plain = net.double().eval()
        fused = copy.deepcopy(plain)
        use_forms(fused, fused=True)
        images = torch.randn(2, 3, size, size, dtype=torch.float64)
        with torch.inference_mode():
            found, wanted = fused(padded(images)), plain(images)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
        assert made.pop().shape[1:] == shape
    assert not made
