"""Networks: published sizes, torchvision's keys, stems, initial values, settings."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models import MODEL_NAMES, AlexNet, ModelSettings, SmallResNet, alexnet, create_model
from paceline.models.alexnet import MIN_PIXELS, NORM_NAMES
from paceline.models.resnet import RESNET_LAYOUTS, BasicBlock, Bottleneck, FastResNet, ResNet
from refusals import refused

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet_tiny": 727_288,
    "resnet_fast": 3_469_480,
    "alexnet": 61_100_840,
    "alexnet_bn": 61_103_656,
}
NORM_PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def norms_of(model: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """AlexNets with hidden layers of 16 features."""
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)


# --- settings and the registry -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", {"name": "resnet51"}),
        ("num_classes", {"num_classes": 0}),
        ("stem", {"stem": "smal"}),
        ("stem", {"name": "alexnet", "stem": "small"}),
        ("stem", {"name": "resnet_tiny", "stem": "imagenet"}),
        ("stem", {"name": "resnet_fast", "stem": "imagenet"}),
        ("dropout", {"dropout": 1.0}),
        ("dropout", {"dropout": -0.1}),
        ("dropout", {"dropout": math.nan}),
    ],
)
def test_bad_values_name_their_field(field: str, values: dict[str, Any]) -> None:
    with refused(f"model.{field}") as caught:
        ModelSettings(**values)
    assert caught.value.remedy
    assert field != "name" or "did you mean 'resnet50'?" in str(caught.value)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_name_builds_its_model(name: str) -> None:
    assert set(PARAMETERS) == set(MODEL_NAMES)
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=1000)
        assert count(model) == PARAMETERS[name]
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
        other = create_model(ModelSettings(name=name, dropout=0.1), num_classes=7, in_channels=5)
        assert other(torch.empty(2, 5, 97, 130)).shape == (2, 7)
    assert {m.p for m in other.modules() if isinstance(m, nn.Dropout)} <= {0.1}


@pytest.mark.parametrize("name", ["alexnet", "alexnet_bn"])
def test_images_too_small_for_alexnet_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 63 pixels"):
        create_model(ModelSettings(name=name), num_classes=10, image_size=28)


@pytest.mark.parametrize(
    ("stem", "image_size", "kernel"),
    [("auto", 28, 3), ("auto", 64, 3), ("auto", 65, 7), ("auto", 224, 7), ("imagenet", 32, 7),
     ("small", 224, 3)],
)  # fmt: skip
def test_the_stem_setting(stem: str, image_size: int, kernel: int) -> None:
    with torch.device("meta"):
        settings = ModelSettings(name="resnet18", stem=stem)
        model = create_model(settings, num_classes=10, in_channels=1, image_size=image_size)
    assert model.conv1.weight.shape == (64, 1, kernel, kernel)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet_tiny", "resnet_fast"])
@pytest.mark.parametrize("zero", [True, False])
def test_the_gamma_setting_affects_the_last_norm_of_each_branch(name: str, zero: bool) -> None:
    settings = ModelSettings(name=name, zero_init_gamma=zero)
    model = create_model(settings, num_classes=10, image_size=32)
    zeros = {name for name, norm in norms_of(model).items() if not norm.weight.any()}
    last = "bn3" if name == "resnet50" else "bn2"
    blocks = {n for n, m in model.named_modules() if isinstance(m, BasicBlock | Bottleneck)}
    assert zeros == ({f"{block}.{last}" for block in blocks} if zero else set())


# --- ResNets -----------------------------------------------------------------------------------


def torchvision_keys(convolutions: int, depths: Collection[int]) -> set[str]:
    """The keys by rule, independent of the model's code."""
    keys = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{part}" for part in NORM_PARTS}
    for stage, depth in enumerate(depths, start=1):
        for block in range(depth):
            at = f"layer{stage}.{block}"
            for n in range(1, convolutions + 1):
                keys |= {f"{at}.conv{n}.weight"} | {f"{at}.bn{n}.{p}" for p in NORM_PARTS}
            # Only bottlenecks change the number of channels in the first stage.
            if block == 0 and (stage > 1 or convolutions == 3):
                keys |= {f"{at}.downsample.0.weight"}
                keys |= {f"{at}.downsample.1.{p}" for p in NORM_PARTS}
    return keys


@pytest.mark.parametrize("name", RESNET_LAYOUTS)
def test_resnet_keys_are_torchvisions_with_either_stem(name: str) -> None:
    block, depths = RESNET_LAYOUTS[name]
    with torch.device("meta"):
        models = [ResNet(block, depths, stem=stem) for stem in ("imagenet", "small")]
    for model in models:
        keys = torchvision_keys(3 if block is Bottleneck else 2, depths)
        assert set(model.state_dict()) == keys


@pytest.mark.parametrize(("stem", "last_pixels"), [("imagenet", 2), ("small", 8)])
def test_the_stem_determines_the_size_of_the_maps(stem: str, last_pixels: int) -> None:
    seen = []
    with torch.device("meta"):
        model = ResNet(*RESNET_LAYOUTS["resnet18"], stem=stem)
        model.layer4.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape)))
        model(torch.empty(2, 3, 64, 64))
        first: Any = ResNet(*RESNET_LAYOUTS["resnet50"]).layer2[0]
    assert seen == [(2, 512, last_pixels, last_pixels)]
    strides = [c.stride for c in (first.conv1, first.conv2, first.conv3)]
    assert strides == [(1, 1), (2, 2), (1, 1)], "version 1.5"


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_zero_gamma_makes_every_block_its_shortcut(block: Any) -> None:
    torch.manual_seed(0)
    model = ResNet(block, (1, 2, 1, 1), stem="small", zero_init_gamma=True, num_classes=3)
    compared = []

    def compare(module: Any, inputs: Any, output: Any) -> None:
        # The ReLUs work in place, but never on the input of a block.
        shortcut = inputs[0] if module.downsample is None else module.downsample(inputs[0])
        compared.append(torch.equal(output, torch.relu(shortcut)))

    for module in model.modules():
        if isinstance(module, block):
            module.register_forward_hook(compare)
    model(torch.randn(4, 3, 16, 16))
    assert compared == [True] * 5


def test_resnet_initial_values_gradients_and_channels() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"stem": "small", "num_classes": 4, "zero_init_gamma": False}
    model = ResNet(*RESNET_LAYOUTS["resnet18"], **options)
    weight = model.get_parameter("layer4.1.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)  # He, fan-out
    model(torch.randn(2, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_the_small_resnet() -> None:
    assert count(SmallResNet()) == 599_290


def test_the_fast_resnet() -> None:
    """The largest value of each channel counts, and logits are scaled."""
    torch.manual_seed(0)
    model = FastResNet(num_classes=4, channels=(4, 8, 8, 16), zero_init_gamma=False)
    inputs = []
    model.fc.register_forward_hook(lambda _m, given, out: inputs.extend((*given, out)))
    logits = model(torch.randn(3, 3, 32, 32))
    assert inputs[0].shape == (3, 16)
    torch.testing.assert_close(logits, inputs[1] / 8)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


# --- AlexNets ----------------------------------------------------------------------------------

CONVS = (0, 3, 6, 8, 10)
PLAIN_KEYS = {f"features.{n}.{part}" for n in CONVS for part in ("weight", "bias")} | {
    f"classifier.{n}.{part}" for n in (1, 4, 6) for part in ("weight", "bias")
}


def test_alexnet_keys_are_torchvisions_and_norms_are_added() -> None:
    with torch.device("meta"):
        plain, normed = AlexNet(), AlexNet(norms=NORM_NAMES)
    assert set(plain.state_dict()) == PLAIN_KEYS
    added = {f"features.{name}.{part}" for name in NORM_NAMES for part in NORM_PARTS}
    assert set(normed.state_dict()) == PLAIN_KEYS | added
    order = [name for name, _ in normed.features.named_children()]
    for number in CONVS:
        assert order[order.index(str(number)) + 1] == f"bn{number}"
    assert order[-2:] == ["12", "bn_pool5"]
    with torch.device("meta"):
        single = AlexNet(norms=["bn3"])
    assert set(norms_of(single)) == {"features.bn3"}


def test_alexnet_sizes() -> None:
    with torch.device("meta"):
        model = AlexNet(num_classes=7, in_channels=2)
        for pixels in (MIN_PIXELS, 224, 227, 256):
            assert model(torch.empty(3, 2, pixels, pixels)).shape == (3, 7)
        features = AlexNet().features
        assert features(torch.empty(1, 3, MIN_PIXELS, MIN_PIXELS)).shape[-2:] == (1, 1)
        with pytest.raises(RuntimeError):
            features(torch.empty(1, 3, MIN_PIXELS - 1, MIN_PIXELS - 1))


@pytest.mark.usefixtures("narrow")
def test_alexnet_initial_values_and_gradients() -> None:
    torch.manual_seed(0)
    model = AlexNet(num_classes=5, dropout=0.0)
    F.cross_entropy(model(torch.randn(2, 3, 96, 96)), torch.tensor([0, 4])).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    plain, normed = AlexNet(num_classes=5).eval(), AlexNet(num_classes=5, norms=NORM_NAMES).eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(normed(x), plain(x), rtol=1e-3, atol=1e-4)
