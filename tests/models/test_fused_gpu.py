"""The fused kernels, compiled on a GPU. `fused_cases.py` has more of their logic."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from full_products import full_products
from models.norm_reference import Wanted, as_map, norm_for, ours, random_map
from paceline.models.resnet import BasicBlock, FastResNet, ResNet, SmallResNet, fuse_norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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
    from paceline.models.fused import norm_act_twice

    wanted = Wanted(shape, kind, residual=residual, uses=uses, device="cuda")
    wanted.check(ours(wanted, norm_act_twice), TOLERANCE[kind], statistics=5e-5)


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_norm_alone(shape: tuple[int, ...], kind: torch.dtype) -> None:
    from paceline.models.fused import norm_act

    wanted = Wanted(shape, kind, relu=False, device="cuda")
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=False),))
    wanted.check(found, TOLERANCE[kind], statistics=5e-5)


@pytest.mark.parametrize("shape", POOLED, ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("uses", [(0, 1), (1,)], ids=["both", "second"])
def test_norm_relu_and_pool(
    shape: tuple[int, ...], kind: torch.dtype, uses: tuple[int, ...]
) -> None:
    from paceline.models.fused import norm_act_pool

    wanted = Wanted(shape, kind, pooled=True, uses=uses, device="cuda")
    found = ours(wanted, lambda x, norm, extra: norm_act_pool(x, norm))
    wanted.check(found, TOLERANCE[kind], statistics=5e-5)


def test_precision_with_a_mean_far_from_zero() -> None:
    """Without ReLU, where the last digit would decide the side."""
    from paceline.models.fused import norm_act

    wanted = Wanted((16, 64, 28, 28), torch.float32, mean=1000.0, relu=False, device="cuda")
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=False),))
    wanted.check(found, 1e-3, statistics=1e-6)


@pytest.mark.parametrize("pooled", [False, True])
def test_nan_propagates(pooled: bool) -> None:
    """The maximum of a GPU drops NaN, which the interpreter does not show."""
    from paceline.models.fused import norm_act, norm_act_pool

    x = as_map(random_map((2, 17, 6, 6), torch.float16)).cuda()
    x[1, 2, 3, 3] = torch.nan
    x.requires_grad_()
    norm = norm_for(17).cuda()
    y = norm_act_pool(x, norm)[0] if pooled else norm_act(x, norm)
    y.sum().backward()
    assert x.grad is not None
    for found in (y, x.grad):
        assert found[:, 2].isnan().all()
        assert found[:, [0, 1, *range(3, 17)]].isfinite().all()


def made(stem: str) -> nn.Module:
    torch.manual_seed(0)
    if stem == "tiny":
        return SmallResNet(num_classes=10, in_channels=3, zero_init_gamma=False)
    if stem == "fast":
        return FastResNet(num_classes=10, zero_init_gamma=False)
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, stem=stem, zero_init_gamma=False)


def gradients(model: nn.Module, images: Tensor, half: bool) -> dict[str, Tensor]:
    with torch.autocast("cuda", torch.float16, enabled=half):
        out = model(images)
    labels = torch.arange(len(images), device="cuda") % 10
    F.cross_entropy(out.double(), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def away(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("stem", "size"), [("tiny", 32), ("fast", 32), ("small", 32), ("imagenet", 96)]
)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_a_fused_net_has_the_gradients_of_a_plain_one(stem: str, size: int, half: bool) -> None:
    """About as far from those in float64 as torch's own operators."""
    plain = made(stem).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert fuse_norms(fused) >= 4
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, size, size, generator=draw).cuda()
    images = images.contiguous(memory_format=torch.channels_last)
    found = gradients(fused, images, half)
    plains = gradients(plain, images, half)
    for name, want in gradients(exact, images.double(), False).items():
        limit = 3 * away(plains[name], want) + (5e-3 if half else 1e-3)
        assert away(found[name], want) < limit, name
    for name, value in plain.named_buffers():
        tolerance = 5e-3 if half else 1e-4
        torch.testing.assert_close(
            fused.get_buffer(name), value, rtol=tolerance, atol=tolerance, msg=name
        )
