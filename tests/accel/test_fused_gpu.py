"""The fused kernels, compiled on a GPU. `fused_cases.py` has more of their logic."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.forms import use_forms
from accel.norm_reference import Wanted, away, channels_last, norm_for, ours, random_map
from accel.window_reference import CASES, convolution, form_of, windows_of
from full_products import full_products
from paceline.accel.stem import convolve_images
from paceline.models import AlexNet
from paceline.models.alexnet import NORM_NAMES
from paceline.models.resnet import BasicBlock, FastResNet, ResNet, SmallResNet

pytestmark = pytest.mark.gpu

# Of ResNet-50, and sizes that nothing divides.
SHAPES = [(8, 64, 56, 56), (4, 2048, 7, 7), (16, 256, 14, 14), (3, 17, 37, 29), (2, 130, 3, 2)]
POOLED = [(4, 64, 112, 112), (3, 17, 37, 28), (2, 70, 9, 9)]
TOLERANCE = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _full_products() -> Iterator[None]:
    with full_products():
        yield


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize(("residual", "uses"), [(False, (0, 1)), (True, (0,))], ids=str)
def test_norm_sum_and_relu(
    shape: tuple[int, ...], kind: torch.dtype, residual: bool, uses: tuple[int, ...]
) -> None:
    from paceline.accel.fused import norm_act_twice

    wanted = Wanted(shape, kind, residual=residual, uses=uses, device="cuda")
    wanted.check(ours(wanted, norm_act_twice), TOLERANCE[kind], statistics=5e-5)


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_norm_alone(shape: tuple[int, ...], kind: torch.dtype) -> None:
    from paceline.accel.fused import norm_act

    wanted = Wanted(shape, kind, relu=False, device="cuda")
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=False),))
    wanted.check(found, TOLERANCE[kind], statistics=5e-5)


@pytest.mark.parametrize("shape", POOLED, ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("uses", [(0, 1), (1,)], ids=["both", "second"])
def test_norm_relu_and_pool(
    shape: tuple[int, ...], kind: torch.dtype, uses: tuple[int, ...]
) -> None:
    from paceline.accel.fused import norm_act_pool

    wanted = Wanted(shape, kind, pooled=True, uses=uses, device="cuda")
    found = ours(wanted, lambda x, norm, extra: norm_act_pool(x, norm))
    wanted.check(found, TOLERANCE[kind], statistics=5e-5)


def test_precision_with_a_mean_far_from_zero() -> None:
    """There is no ReLU, because its mask would depend on the last digit."""
    from paceline.accel.fused import norm_act

    wanted = Wanted((16, 64, 28, 28), torch.float32, mean=1000.0, relu=False, device="cuda")
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=False),))
    wanted.check(found, 1e-3, statistics=1e-6)


@pytest.mark.parametrize("pooled", [False, True])
def test_nan_propagates(pooled: bool) -> None:
    """The maximum of a GPU drops NaN, which the interpreter does not show."""
    from paceline.accel.fused import norm_act, norm_act_pool

    x = channels_last(random_map((2, 17, 6, 6), torch.float16)).cuda()
    x[1, 2, 3, 3] = torch.nan
    x.requires_grad_()
    norm = norm_for(17).cuda()
    y = norm_act_pool(x, norm)[0] if pooled else norm_act(x, norm)
    y.sum().backward()
    assert x.grad is not None
    for found in (y, x.grad):
        assert found[:, 2].isnan().all()
        assert found[:, [0, 1, *range(3, 17)]].isfinite().all()


def with_fourth_channel(images: Tensor) -> Tensor:
    return channels_last(F.pad(images, (0, 0, 0, 0, 0, 1)))


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "size"), [*CASES, ("alexnet", (224, 224)), ("small", (32, 32))], ids=str
)
def test_the_windows_of_images(name: str, size: tuple[int, int], kind: torch.dtype) -> None:
    from paceline.accel.stem_kernels import image_windows

    form = form_of(convolution(name))
    images = torch.randn(5, 3, *size, device="cuda").to(kind)
    down, across = (form.windows(pixels) for pixels in size)
    found = image_windows(with_fourth_channel(images), form, down, across)
    assert found.is_contiguous(memory_format=torch.channels_last)
    wanted = windows_of(F.pad(images, (0, 0, 0, 0, 0, form.channels - 3)), form)
    assert torch.equal(found, wanted)


def test_windows_of_more_than_32_bits_of_elements() -> None:
    """Offsets of images and of windows, in the last image."""
    from paceline.accel.stem_kernels import image_windows

    form = form_of(convolution("alexnet"))
    samples, size = 11_000, 224
    images = torch.zeros((samples, size, size, 4), dtype=torch.float16, device="cuda")
    images = images.permute(0, 3, 1, 2)
    images[-1, :3] = torch.randn(3, size, size)
    found = image_windows(images, form, form.windows(size), form.windows(size))
    assert min(images.numel(), found.numel()) > 2**31
    assert torch.equal(found[-1:], windows_of(images[-1:], form))


@pytest.mark.parametrize(
    ("name", "size"),
    [("alexnet", (224, 224)), ("alexnet", (161, 90)), ("small", (32, 32))],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_a_first_convolution_on_windows(
    name: str, size: tuple[int, int], kind: torch.dtype
) -> None:
    """The result is as close to float64 as the plain one in the same format."""
    torch.manual_seed(0)
    layer = convolution(name, 64, bias=False).to("cuda", kind, memory_format=torch.channels_last)
    images = channels_last(torch.randn(16, 3, *size, device="cuda").to(kind))
    exact = copy.deepcopy(layer).double()
    wanted = exact(images.double())
    slope = channels_last(torch.randn_like(wanted).to(kind))
    wanted.backward(slope.double())
    errors = []
    for given in (images, with_fourth_channel(images)):
        layer.zero_grad()
        maps = convolve_images(layer, given, padded=True)
        assert maps.is_contiguous(memory_format=torch.channels_last)
        maps.backward(slope)
        errors.append(
            (away(maps.detach(), wanted.detach()), away(layer.weight.grad, exact.weight.grad))
        )
    for on_windows, plain in zip(errors[1], errors[0], strict=True):
        assert on_windows < 1.5 * plain + TOLERANCE[kind] / 10


def made(stem: str) -> nn.Module:
    torch.manual_seed(0)
    if stem == "tiny":
        return SmallResNet(num_classes=10, in_channels=3, zero_init_gamma=False)
    if stem == "fast":
        return FastResNet(num_classes=10, zero_init_gamma=False)
    if stem == "alexnet":
        return AlexNet(num_classes=10, norms=NORM_NAMES, dropout=0.0)
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, stem=stem, zero_init_gamma=False)


def gradients(model: nn.Module, images: Tensor, half: bool) -> dict[str, Tensor]:
    with torch.autocast("cuda", torch.float16, enabled=half):
        out = model(images)
    labels = torch.arange(len(images), device="cuda") % 10
    F.cross_entropy(out.double(), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("stem", "size", "padded"),
    [("tiny", 32, False), ("fast", 32, False), ("small", 32, False), ("imagenet", 96, False),
     ("fast", 32, True), ("small", 33, True), ("imagenet", 96, True), ("alexnet", 99, True)],
)  # fmt: skip
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_a_fused_net_has_the_gradients_of_a_plain_one(
    stem: str, size: int, padded: bool, half: bool
) -> None:
    """About as far from those in float64 as torch's own operators."""
    plain = made(stem).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    use_forms(fused, fused=True)
    draw = torch.Generator().manual_seed(1)
    images = channels_last(torch.randn(64, 3, size, size, generator=draw).cuda())
    found = gradients(fused, with_fourth_channel(images) if padded else images, half)
    plains = gradients(plain, images, half)
    for name, want in gradients(exact, images.double(), False).items():
        if name not in found:
            # The norm removes a convolution's bias.
            assert stem == "alexnet", name
            assert name.startswith("features."), name
            assert name.endswith("bias"), name
            assert ".bn" not in name, name
            continue
        limit = 3 * away(plains[name], want) + (5e-3 if half else 1e-3)
        assert away(found[name], want) < limit, name
    for name, value in plain.named_buffers():
        tolerance = 5e-3 if half else 1e-4
        torch.testing.assert_close(
            fused.get_buffer(name), value, rtol=tolerance, atol=tolerance, msg=name
        )
