"""Whole residual nets on the fused kernels, in Triton's interpreter, against plain ones in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from accel.forms import use_forms
from accel.norm_reference import away
from paceline.accel import fused_forward
from paceline.accel.fused import channels_last
from paceline.accel.fused_blocks import DeferredOutput
from paceline.accel.fused_forward import FusedForward
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.accel.networks import Block, Network, part_of
from paceline.accel.recompute import BlockInput, branch_and_shortcut
from paceline.models.alexnet import NORM_NAMES, AlexNet
from paceline.models.resnet import (
    BasicBlock,
    Bottleneck,
    FastResNet,
    ResNet,
    SmallResNet,
)
from paceline.train.batch_norm import BatchNormState


def small() -> nn.Module:
    return SmallResNet(num_classes=5, in_channels=3, zero_init_gamma=False)


def pooled() -> nn.Module:
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=5, zero_init_gamma=False)


def small_stem() -> nn.Module:
    return ResNet(BasicBlock, (2, 1, 1, 1), num_classes=5, stem="small", zero_init_gamma=False)


def fast() -> nn.Module:
    return FastResNet(num_classes=5, channels=(4, 8, 12, 16), zero_init_gamma=False)


class Bottlenecks(nn.Module):
    """Narrow, because the interpreter is slow, with few ReLUs: at an input near 0 rounding decides the
    side, which is a large error."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            Bottleneck(8, 4), Bottleneck(16, 4), Bottleneck(16, 8, 2), Bottleneck(32, 8)
        )
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.conv1(x)))

    def head(self, maps: Tensor) -> Tensor:
        return self.fc(maps.mean((2, 3)))


def images(size: int, batch: int = 6) -> Tensor:
    """Large enough for a stable batch norm of the last maps."""
    return channels_last(
        torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))
    )


def prepared(
    make: Callable[[], nn.Module], fused: bool, products: bool = False
) -> tuple[nn.Module, BatchNormState]:
    torch.manual_seed(0)
    model = make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    choices = Choices(CUDNN) if products else None
    if isinstance(model, Bottlenecks):
        fuse_bottlenecks(model, fused, choices)
    else:
        use_forms(model, fused=fused, choices=choices)
    return model, BatchNormState(model)


def fuse_bottlenecks(model: Bottlenecks, fused: bool, choices: Choices | None) -> None:
    if fused:
        parts = Network(tuple(map(part_of, model.blocks)), model.head)
        forward = FusedForward(parts, choices=choices)
        model.forward = lambda x: forward(model.conv1(x))  # type: ignore[method-assign]


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients."""
    logits = model(x)
    F.cross_entropy(logits, torch.arange(len(x)) % 5).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return logits.detach(), grads


@pytest.mark.parametrize(
    ("make", "size", "products"),
    [(small, 12, False), (pooled, 33, False), (fast, 20, False), (Bottlenecks, 10, False),
     (small, 12, True), (pooled, 33, True), (fast, 20, True), (small_stem, 16, True)],
)  # fmt: skip
def test_a_fused_net_learns_what_a_plain_one_learns(
    make: Callable[[], nn.Module], size: int, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[nn.Module] = []
    fused_block = fused_forward.fused_block

    def recorded(block: Block, x: BlockInput, *given: Any) -> DeferredOutput:
        ran.append(block.module)
        return fused_block(block, x, *given)

    monkeypatch.setattr(fused_forward, "fused_block", recorded)
    x = images(size)
    fused, statistics = prepared(make, True, products)
    plain, plain_statistics = prepared(make, fused=False)
    exact = copy.deepcopy(plain).double()
    logits, grads = run(fused, x)
    assert bool(ran) == products
    plain_logits, plain_grads = run(plain, x)
    exact_logits, exact_grads = run(exact, x.double())
    # About as far from the exact values as torch's own operators.
    assert away(logits, exact_logits) < 5 * away(plain_logits, exact_logits) + 1e-6
    for name, gradient in exact_grads.items():
        limit = 5 * away(plain_grads[name], gradient) + 1e-5
        assert away(grads[name], gradient) < limit, name
    torch.testing.assert_close(statistics.flat, plain_statistics.flat, rtol=1e-4, atol=1e-5)
    assert torch.equal(statistics.tracked, plain_statistics.tracked)
    assert statistics.tracked.unique().tolist() == [1]


def test_evaluation_uses_torchs_operators() -> None:
    fused, plain = (prepared(small, on, on)[0].eval() for on in (True, False))
    x = images(16)
    assert torch.equal(fused(x), plain(x))


@pytest.mark.parametrize("make", [fast, small_stem])
def test_a_small_stem_takes_images_with_an_empty_channel(make: Callable[[], nn.Module]) -> None:
    x = images(16)
    plain, plain_grads = run(prepared(make, fused=True)[0], x)
    padded, grads = run(prepared(make, fused=True)[0], channels_last(F.pad(x, (0, 0, 0, 0, 0, 1))))
    assert away(padded, plain.double()) < 1e-4
    assert away(grads["conv1.weight"], plain_grads["conv1.weight"].double()) < 1e-3


def test_images_with_an_empty_channel_give_the_same() -> None:
    model, _ = prepared(pooled, fused=True)
    x = images(20)
    found = []
    for given in (x, F.pad(x, (0, 0, 0, 0, 0, 1))):
        model.zero_grad()
        forward = model.forward
        first = forward.network.parts[0]
        x = given.contiguous(memory_format=torch.channels_last)
        maps, _ = branch_and_shortcut(forward.conv_norm(first, x))
        (maps * torch.linspace(-1, 1, maps.numel()).view_as(maps)).sum().backward()
        found.append((maps.detach().double(), model.conv1.weight.grad.double()))
    for padded, plain in zip(found[1], found[0], strict=True):
        assert away(padded, plain) < 1e-4


def fused_features(forward: FusedForward, x: Tensor) -> Tensor:
    """The last maps, with a head that passes them on."""
    net = forward.network
    kept = FusedForward(replace(net, head=lambda maps: maps), recompute=forward.recompute)
    return kept(x)


@pytest.mark.parametrize(("padded", "recompute"), [(False, False), (True, False), (True, True)])
def test_the_fused_features_of_alexnet(padded: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    model = AlexNet(num_classes=5, norms=NORM_NAMES)
    model.classifier = nn.Identity()  # 59 million weights that are not used
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    forward = use_forms(model, fused=True, recompute=recompute)
    x = images(87, batch=3)
    ours_x = channels_last(F.pad(x, (0, 0, 0, 0, 0, 1))) if padded else x
    found = []
    for net, given in ((exact, x.double()), (plain, x), (model, ours_x)):
        maps = fused_features(forward, given) if net is model else net.features(given)
        (maps * torch.linspace(-1, 1, maps.numel()).view_as(maps)).sum().backward()
        found.append((maps.detach(), net))
    assert away(found[2][0], found[0][0]) < 5 * away(found[1][0], found[0][0]) + 1e-6
    for name, parameter in exact.named_parameters():
        ours = model.get_parameter(name).grad
        if name.endswith("bias") and ".bn" not in name:
            assert ours is None, "the norm removes a convolution's bias"
            continue
        theirs = plain.get_parameter(name).grad
        limit = 5 * away(theirs, parameter.grad) + 1e-4
        assert away(ours, parameter.grad) < limit, name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-4, atol=1e-5)


def test_a_single_value_raises() -> None:
    fused, _ = prepared(small, fused=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(images(8, batch=1))
