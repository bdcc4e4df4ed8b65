"""First convolutions on windows of pixels equal the plain ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.forms import network, use_forms
from accel.window_reference import CASES, convolution, form_of, windows_of
from interpreter_run import needs_triton, run_interpreted
from paceline.accel.networks import network_of
from paceline.accel.stem import convolve_images, describe_stem, pads_images, window_form
from paceline.models import AlexNet, alexnet
from paceline.models.alexnet import NORM_NAMES
from paceline.models.resnet import BasicBlock, FastResNet, ResNet


@needs_triton
def test_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).parent / "stem_cases.py", at_least=63)


@pytest.mark.parametrize(("name", "size"), CASES, ids=str)
def test_a_convolution_of_windows_is_the_convolution(name: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = convolution(name).double()
    form = form_of(layer)
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    pixels = F.pad(images, (0, 0, 0, 0, 0, form.channels - 3))
    weight = form.weight(layer.weight)
    assert weight.shape == (6, form.width, form.taps, form.taps)
    maps = F.conv2d(windows_of(pixels, form), weight, layer.bias)
    wanted = layer(images)
    torch.testing.assert_close(maps, wanted, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(wanted)
    (found,) = torch.autograd.grad(maps, layer.weight, slope)
    (theirs,) = torch.autograd.grad(wanted, layer.weight, slope)
    torch.testing.assert_close(found, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 7, 2, 3),
        nn.Conv2d(3, 4, 5, 1, 2),
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.Conv2d(3, 4, (11, 3), 4, 2),
        nn.Conv2d(3, 4, 11, (4, 2), 2),
        nn.Conv2d(3, 4, 3, 1, (1, 0)),
        nn.Conv2d(3, 4, 3, 1, "same"),
        nn.Conv2d(3, 4, 3, 1, 1, dilation=2),
        nn.Conv2d(3, 6, 3, 1, 1, groups=3),
        nn.Conv2d(3, 4, 3, 1, 1, padding_mode="reflect"),
        nn.Conv2d(1, 4, 3, 1, 1),
        nn.Conv2d(4, 4, 11, 4, 2),
    ],
    ids=str,
)
def test_others_have_no_form(layer: nn.Conv2d) -> None:
    assert window_form(layer) is None


@pytest.mark.parametrize(("biased", "padded"), [(True, True), (False, True), (False, False)])
def test_on_a_cpu_images_are_convolved_as_they_are(biased: bool, padded: bool) -> None:
    layer, images = convolution("alexnet"), torch.randn(2, 3, 23, 30)
    plain = F.conv2d(images, layer.weight, layer.bias if biased else None, 4, 2)
    assert torch.equal(convolve_images(layer, images, padded=padded, biased=biased), plain)
    given = F.pad(images, (0, 0, 0, 0, 0, 1))
    if padded:
        found = convolve_images(layer, given, padded=True, biased=biased)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(RuntimeError, match="channels"):
            convolve_images(layer, given, padded=False)


def logits_and_gradient(net: AlexNet, images: Tensor) -> tuple[Tensor, Tensor]:
    first = net.features[0]
    logits = net(images)
    (found,) = torch.autograd.grad(logits.square().sum(), first.weight)
    return logits.detach(), found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_alexnet_takes_padded_images_where_its_norms_do_not_fuse(
    training: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in evaluation mode, in which convolutions add their bias."""
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)
    torch.manual_seed(0)
    plain = AlexNet(num_classes=3, norms=NORM_NAMES, dropout=0.0).double().train(training)
    for name in NORM_NAMES[:-1]:
        nn.init.normal_(plain.features.get_submodule(name).running_mean)  # type: ignore[arg-type]
    fused = copy.deepcopy(plain)
    assert pads_images(network(fused).first)
    use_forms(fused, fused=True, recompute=recompute)
    images = torch.randn(4, 3, 71, 66, dtype=torch.float64)
    wanted = logits_and_gradient(plain, images)
    found = logits_and_gradient(fused, F.pad(images, (0, 0, 0, 0, 0, 1)))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_only_a_fused_alexnet_takes_padded_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)
    assert network_of(AlexNet(num_classes=3)) is None
    assert not pads_images(network(AlexNet(norms=NORM_NAMES, in_channels=1)).first)
    unfused = AlexNet(num_classes=3, norms=NORM_NAMES).eval()
    with pytest.raises(RuntimeError, match="channels"):
        unfused(torch.zeros(1, 4, 64, 64))


def nets() -> list[tuple[nn.Module, nn.Module, str]]:
    """Returns a net, the module that contains the first convolution, and its name there."""
    net = AlexNet(num_classes=3, norms=NORM_NAMES)
    fast = FastResNet(num_classes=3)
    small = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, stem="small")
    return [(net, net.features, "0"), (fast, fast, "conv1"), (small, small, "conv1")]


@pytest.mark.parametrize("channels", [1, 4])
def test_a_replaced_first_convolution_gets_images_as_they_are(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)
    for net, holder, name in nets():
        first = network(net).first
        assert "windows of " in describe_stem(first)
        other = nn.Conv2d(channels, 64, first.kernel_size, first.stride, first.padding, bias=False)
        for layer in (other, nn.Sequential(other)):
            holder.register_module(name, layer)
            assert network(net).first is layer
            assert not pads_images(layer)
            assert describe_stem(layer) == ""
            use_forms(net, fused=True)
            assert net.eval()(torch.randn(2, channels, 71, 66)).shape == (2, 3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 64, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(3, 63, 3, padding=1, groups=3, bias=False),
        nn.Conv2d(3, 64, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(3, 64, 3, padding="same", bias=False),
        nn.utils.spectral_norm(nn.Conv2d(3, 64, 3, padding=1, bias=False)).eval(),
    ],
    ids=["dilation", "groups", "reflect", "same", "spectral_norm"],
)
def test_other_convolutions_of_three_channels_get_images_as_they_are(layer: nn.Conv2d) -> None:
    net = FastResNet(num_classes=3, channels=(layer.out_channels, 8, 8, 8))
    net.conv1.register_forward_hook(lambda *given: None)
    assert pads_images(net.conv1), "images are padded for the whole run, hooks may come and go"
    assert not pads_images(layer)
    images = torch.randn(2, 3, 9, 9)
    for biased in (True, False):
        assert convolve_images(layer, images, padded=False, biased=biased).equal(layer(images))
