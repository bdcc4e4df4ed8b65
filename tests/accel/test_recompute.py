"""Norms that backward computes again: the bits of stored ones, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.forms import use_forms
from accel.live_bytes import LiveBytes
from accel.norm_reference import channels_last
from paceline.accel.forward import Forward
from paceline.accel.recompute import RecomputedActivation
from paceline.models import resnet
from paceline.models.alexnet import NORM_NAMES, AlexNet
from paceline.models.registry import create_model
from paceline.models.resnet import BasicBlock, Bottleneck, FastResNet, ResNet, SmallResNet
from paceline.models.settings import ModelSettings
from paceline.models.synced_norm import NormGroup, synchronize_norms, use_torch_norms
from paceline.planner.layers import network

CLASSES = 5


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual nets with few weights."""
    monkeypatch.setattr(resnet, "STAGE_CHANNELS", (8, 12, 16, 20))


narrowed = pytest.mark.usefixtures("narrow")


def small_stem() -> nn.Module:
    return ResNet(
        BasicBlock, (2, 1, 1, 2), num_classes=CLASSES, stem="small", zero_init_gamma=False
    )


def bottlenecks() -> nn.Module:
    return ResNet(Bottleneck, (3, 2, 1, 1), num_classes=CLASSES, zero_init_gamma=False)


def tiny() -> nn.Module:
    return SmallResNet(num_classes=CLASSES, in_channels=3, zero_init_gamma=False)


def fast() -> nn.Module:
    return FastResNet(num_classes=CLASSES, channels=(8, 12, 16, 20), zero_init_gamma=False)


def alexnet() -> nn.Module:
    net = AlexNet(num_classes=CLASSES, norms=NORM_NAMES)
    net.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256 * 36, CLASSES))
    return net


Make = Callable[[], nn.Module]
# With the edge of images that leaves the last maps more than one pixel.
NETS: dict[str, tuple[Make, int]] = {
    "small stem": (small_stem, 16),
    "bottlenecks": (bottlenecks, 64),
    "tiny": (tiny, 16),
    "fast": (fast, 16),
    "alexnet": (alexnet, 67),
}


def pair(make: Make, change: Callable[[nn.Module], object] = lambda net: None) -> tuple[Any, Any]:
    """Twice the same net; the second computes its norms again."""
    torch.manual_seed(0)
    net = make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # γ and β that are all different, some γ negative
            nn.init.normal_(module.weight, 0.8, 0.5)
            nn.init.normal_(module.bias, 0.1, 0.3)
    again = copy.deepcopy(net)
    change(net)
    change(again)
    use_forms(again, recompute=True)
    return net, again


def images(size: int, batch: int = 4, kind: torch.dtype = torch.float32) -> Tensor:
    return channels_last(
        torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).to(kind)
    )


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float(), torch.arange(len(x)) % CLASSES)


def trained(net: nn.Module, x: Tensor, passes: int = 2) -> dict[str, Tensor]:
    """Outputs, accumulated gradients and running statistics after some passes."""
    torch.manual_seed(2)  # dropout
    total = torch.zeros(())
    for _ in range(passes):
        part = loss(net, x)
        part.backward()  # type: ignore[no-untyped-call]
        total += part.detach()
    found = {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    found |= {"loss": total, **dict(net.named_buffers())}
    return {name: value for name, value in found.items() if value is not None}


def assert_same(stored: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    assert stored.keys() == again.keys()
    for name, value in stored.items():
        assert torch.equal(value, again[name]), name


def in_half(net: nn.Module) -> None:
    """Converts a net like `precision.policy`: norms stay in fp32."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(torch.bfloat16)


@narrowed
@pytest.mark.parametrize("name", NETS)
def test_bits_are_those_of_stored_norms(name: str) -> None:
    make, size = NETS[name]
    stored, again = pair(make)
    assert_same(trained(stored, images(size)), trained(again, images(size)))


@narrowed
def test_in_half_precision_and_in_nchw_memory() -> None:
    stored, again = pair(small_stem, in_half)
    x = images(16, kind=torch.bfloat16)
    assert_same(trained(stored, x), trained(again, x))

    def to_nchw(net: nn.Module) -> None:
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    stored, again = pair(tiny, to_nchw)
    x = images(16).contiguous()
    assert_same(trained(stored, x), trained(again, x))


@narrowed
def test_weights_that_change_between_forward_and_backward_are_found() -> None:
    model = create_model(ModelSettings(name="resnet_tiny"), num_classes=4, in_channels=3)
    use_forms(model, recompute=True)
    loss = model(torch.randn(2, 3, 16, 16)).sum()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("conv2.weight"):
                weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace"):
        loss.backward()


def test_frozen_layers() -> None:
    """Norms that are frozen as a whole use their running statistics."""

    def freeze(net: nn.Module) -> None:
        for name, module in net.named_modules():
            if name.startswith(("conv1", "bn1", "layer1.0.bn1", "layer2.0.conv2", "layer4.1.bn")):
                module.requires_grad_(False)
                module.train(not isinstance(module, nn.BatchNorm2d))

    stored, again = pair(small_stem, freeze)
    assert_same(trained(stored, images(16)), trained(again, images(16)))
    assert again.conv1.weight.grad is None


def test_norms_of_other_forms() -> None:
    """Synchronized norms exchange nothing when they are recomputed."""
    sums: list[Tensor] = []

    def share(net: nn.Module) -> None:
        def add(given: Tensor) -> None:
            sums.append(given)
            given.mul_(2)  # another rank with the same images

        synchronize_norms(net, NormGroup(2, add, active=True))

    for change in (share, lambda net: use_torch_norms(net) and None):
        stored, again = pair(tiny, change)
        sums.clear()
        found = trained(stored, images(16))
        exchanges = len(sums)
        assert_same(found, trained(again, images(16)))
        assert len(sums) == 2 * exchanges


def test_a_graph_that_is_kept_can_be_walked_again() -> None:
    stored, again = pair(fast)
    for net in (stored, again):
        part = loss(net, images(16))
        part.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        part.backward()  # type: ignore[no-untyped-call]
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter.grad, again.get_parameter(name).grad), name


@narrowed
@pytest.mark.parametrize("name", ["small stem", "tiny", "alexnet"])
def test_evaluation_is_not_changed(name: str) -> None:
    make, size = NETS[name]
    stored, again = pair(make)
    stored.eval()
    again.eval()
    with torch.no_grad():
        assert torch.equal(stored(images(size)), again(images(size)))
    # With gradients too: of running statistics, which stay.
    assert_same(trained(stored, images(size)), trained(again, images(size)))


@narrowed
def test_every_second_block_stores_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    _, net = pair(bottlenecks)
    kinds: list[bool] = []
    block = Forward.block

    def noted(self: Forward, *given: Any) -> Any:
        out = block(self, *given)
        kinds.append(isinstance(out, RecomputedActivation))
        return out

    monkeypatch.setattr(Forward, "block", noted)
    net(images(64))
    # The first block of a stage has a convolution in its shortcut.
    assert kinds == [False, True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("resnet34", 66),
        ("resnet50", 66),
        ("resnet_fast", 32),
        ("alexnet_bn", 66),
    ],
)
def test_the_planner_counts_what_is_not_kept(name: str, size: int) -> None:
    model = create_model(ModelSettings(name=name), num_classes=CLASSES, image_size=size)
    x = images(size, 2)

    def kept(recompute: bool) -> int:
        use_forms(model, recompute=recompute)
        with LiveBytes() as live:
            out = model(x)
            assert out.requires_grad
            return live.now

    net = network(name, size, CLASSES).recomputing_norms()
    assert (
        kept(False) - kept(True)
        == sum(layer.recomputed_elements for layer in net.layers) * x.element_size() * 2
    )


def measured(net: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Bytes behind the forward pass, the most of the whole step, and norms that backward computes."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        part = loss(net, x)
        kept, forward = live.now, live.norms
        part.backward()  # type: ignore[no-untyped-call]
    return kept, live.most, live.norms - forward


@narrowed
# Norms that are computed again: of the stem and inside of blocks, but not before a pool, and of every
# second block's end.
@pytest.mark.parametrize(
    ("name", "share", "norms"),
    [
        ("small stem", 0.3, 1 + 6 + 2),
        ("bottlenecks", 0.2, 14 + 2),
        ("fast", 0.2, 1 + 3 + 3),
        ("alexnet", 0.05, 2),
    ],
)
def test_less_is_kept_and_each_map_is_computed_once(name: str, share: float, norms: int) -> None:
    make, size = NETS[name]
    stored, again = pair(make)
    kept, most, none = measured(stored, images(size))
    kept_again, most_again, computed = measured(again, images(size))
    assert (none, computed) == (0, norms)
    assert kept_again < (1 - share) * kept
    if name != "alexnet":  # whose peak is at the classifier's gradients
        assert most - most_again > 0.5 * (kept - kept_again)
