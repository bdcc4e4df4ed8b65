"""`pl.accelerate`: forms of a model in an own loop, also of residual nets from elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from accel.live_bytes import LiveBytes
from paceline.core.errors import RunError
from refusals import refused


def convolution(into: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, stride, size // 2, bias=False)


class Bottleneck(nn.Module):
    """A block with torchvision's layout and names; `extra` is computed outside of any module."""

    def __init__(self, into: int, width: int, stride: int = 1, extra: float = 1.0) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(into, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        self.extra = extra
        if stride > 1 or into != 4 * width:
            self.downsample = nn.Sequential(
                convolution(into, 4 * width, 1, stride), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out)) * self.extra
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    def __init__(self, extra: float = 1.0) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 4), Bottleneck(16, 4), Bottleneck(16, 4))
        self.layer2 = nn.Sequential(Bottleneck(16, 8, 2), Bottleneck(32, 8, extra=extra))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 5)
        for block in (*self.layer1, *self.layer2):
            nn.init.zeros_(block.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


class TimmResNet(ResNet):
    """A net like timm's: other names of ReLUs, identities in between, and another head."""

    def __init__(self) -> None:
        super().__init__()
        self.act1, self.global_pool = self.relu, nn.AdaptiveAvgPool2d(1)
        del self.relu, self.avgpool
        for block in (*self.layer1, *self.layer2):
            block.act3, block.drop_path, block.aa = (
                nn.ReLU(inplace=True),
                nn.Identity(),
                nn.Identity(),
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.forward_head(self.layer2(self.layer1(x)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(self.global_pool(x).flatten(1), 0.1, self.training))  # type: ignore[no-any-return]


def torchvisions() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(num_classes=5)


def step(net: nn.Module) -> dict[str, Tensor]:
    """Output, gradients and buffers of a training pass, and the output of an evaluation."""
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    out = net.train()(images)
    out.square().sum().backward()
    found = {"out": out.detach(), **{name: p.grad for name, p in net.named_parameters()}}
    found |= {name: value.clone() for name, value in net.named_buffers()}
    with torch.no_grad():
        return {name: v for name, v in found.items() if v is not None} | {
            "eval": net.eval()(images)
        }


@pytest.mark.parametrize("make", [ResNet, TimmResNet, torchvisions])
def test_another_packages_resnet_has_the_same_bits_in_less_memory(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    state = copy.deepcopy(ours.state_dict())
    handle = pl.accelerate(ours, recompute_norms=True)
    assert "norms recomputed" in handle.describe()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]), "found out without a trace"
    kept = []
    for net in (plain, ours):
        with LiveBytes() as live:
            out = net(torch.zeros(2, 3, 64, 64))
            kept.append(live.now)
        del out
    assert kept[1] < 0.9 * kept[0]
    wanted, found = step(plain), step(ours)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    handle.undo()
    handle.undo()
    assert "forward" not in vars(ours)


def test_what_only_looks_like_a_resnet_stays_as_it_is() -> None:
    """This holds even if γ is 0 at the start, so that a branch has no effect."""
    for net in (ResNet(extra=0.5), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))):
        handle = pl.accelerate(net)
        assert "forward" not in vars(net)
        assert handle.describe()
        with refused("run.accel.recompute_norms"):
            pl.accelerate(net, recompute_norms=True)


def test_settings_are_those_of_the_table() -> None:
    net = pl.create_model(pl.ModelSettings("resnet_tiny"), num_classes=3)
    for field, settings in (
        ("run.accel.fused_norm", {"fused_norm": "on"}),  # on a CPU
        ("run.accel.recompute", {"recompute": True}),
        ("compile", {"compile": "model"}),
        ("example", {"fused_convolutions": "auto"}),
    ):
        with refused(field):
            pl.accelerate(net, **settings)
    example = torch.randn(2, 3, 16, 16)
    before = copy.deepcopy(net.state_dict())
    first = pl.accelerate(net, recompute_norms=True, fused_convolutions="auto", example=example)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    for model in (net, nn.ReLU()):
        with refused("model"):
            pl.accelerate(model)
    first.undo()
    again = pl.accelerate(net, recompute_norms=True)
    out = net(example)
    again.undo()
    assert out.shape == (2, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_a_model_has_its_own_weights_and_the_plain_pass(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    net = pl.create_model(pl.ModelSettings("resnet_tiny"), num_classes=3)
    pl.accelerate(net, recompute_norms=True)
    other = copied(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    images = torch.randn(2, 3, 16, 16)
    for mode in (True, False):
        assert not other.train(mode)(images).any()
        assert net.train(mode)(images).any()


def test_parts_that_were_replaced_later_are_refused() -> None:
    net = pl.create_model(pl.ModelSettings("resnet_tiny"), num_classes=3)
    pl.accelerate(net, recompute_norms=True)
    net.fc = nn.Linear(128, 3)
    with pytest.raises(RunError, match="replaced"):
        net.train()(torch.randn(2, 3, 16, 16))
