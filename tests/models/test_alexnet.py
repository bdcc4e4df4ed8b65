"""AlexNets: published parameter counts, torchvision's keys, added norms, the paper's LRN."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.models import alexnet
from paceline.models.alexnet import MIN_PIXELS, NORM_NAMES, AlexNet, AlexNet2012, LocalResponseNorm

CONVS = (0, 3, 6, 8, 10)
PLAIN_KEYS = {f"features.{n}.{part}" for n in CONVS for part in ("weight", "bias")} | {
    f"classifier.{n}.{part}" for n in (1, 4, 6) for part in ("weight", "bias")
}
NORM_PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def narrow(monkeypatch):
    """Hidden layers of 16 features: values instead of shapes, without 60 M of them."""
    monkeypatch.setattr(alexnet, "HIDDEN_FEATURES", 16)


def test_parameter_counts_are_the_published_ones():
    with torch.device("meta"):
        assert count(AlexNet()) == 61_100_840
        assert count(AlexNet2012()) == 60_965_224
        # Two for each channel of conv1 to conv5 and of pool5.
        assert count(AlexNet(norms=NORM_NAMES)) == 61_100_840 + 2 * (64 + 192 + 384 + 3 * 256)


def test_keys_are_torchvisions_and_norms_come_on_top():
    with torch.device("meta"):
        plain, normed = AlexNet().state_dict(), AlexNet(norms=NORM_NAMES).state_dict()
    assert set(plain) == PLAIN_KEYS
    added = {f"features.{name}.{part}" for name in NORM_NAMES for part in NORM_PARTS}
    assert set(normed) == PLAIN_KEYS | added
    assert all(normed[key].shape == plain[key].shape for key in PLAIN_KEYS)


def test_each_norm_stands_right_behind_its_convolution():
    with torch.device("meta"):
        order = [name for name, _ in AlexNet(norms=NORM_NAMES).features.named_children()]
    for number in CONVS:
        assert order[order.index(str(number)) + 1] == f"bn{number}"
    assert order[-2:] == ["12", "bn_pool5"]


@pytest.mark.parametrize("name", NORM_NAMES)
def test_each_norm_can_be_had_alone(name):
    with torch.device("meta"):
        model = AlexNet(norms=[name])
    norms = [n for n, m in model.features.named_children() if isinstance(m, nn.BatchNorm2d)]
    assert norms == [name]
    assert model.added_norm_prefixes == (f"features.{name}.",)


@pytest.mark.parametrize("pixels", [MIN_PIXELS, 224, 227, 256])
@pytest.mark.parametrize("build", [AlexNet, AlexNet2012])
def test_output_shape(build, pixels):
    with torch.device("meta"):
        model = build(num_classes=7, in_channels=2)
        assert model(torch.empty(3, 2, pixels, pixels)).shape == (3, 7)


def test_smallest_image_is_really_the_smallest():
    with torch.device("meta"):
        features = AlexNet().features
        assert features(torch.empty(1, 3, MIN_PIXELS, MIN_PIXELS)).shape[-2:] == (1, 1)
        with pytest.raises(RuntimeError):
            features(torch.empty(1, 3, MIN_PIXELS - 1, MIN_PIXELS - 1))


@pytest.mark.parametrize("pixels", [224, 227])
def test_original_reaches_6x6_without_the_adaptive_pool(pixels):
    with torch.device("meta"):
        assert AlexNet2012().features(torch.empty(1, 3, pixels, pixels)).shape == (1, 256, 6, 6)


def test_original_starts_as_published(narrow):
    torch.manual_seed(0)
    model = AlexNet2012(num_classes=10)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [layer.bias.unique().tolist() for layer in layers] == [
        *([0.0], [1.0], [0.0], [1.0], [1.0]),  # conv1 to conv5
        *([1.0], [1.0], [0.0]),
    ]
    assert layers[2].weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_local_response_norm_is_the_papers_formula():
    torch.manual_seed(0)
    x = 50 * torch.randn(2, 9, 3, 3)
    expected = torch.empty_like(x)
    for channel in range(9):
        window = x[:, max(0, channel - 2) : channel + 3].square().sum(1)
        expected[:, channel] = x[:, channel] / (2 + 1e-4 * window) ** 0.75
    torch.testing.assert_close(LocalResponseNorm()(x), expected)


def test_local_response_norm_survives_half_precision():
    x = torch.full((1, 8, 2, 2), 1000.0, dtype=torch.float16)
    out = LocalResponseNorm()(x)
    assert out.dtype == torch.float16
    wide = LocalResponseNorm()(x.float())
    torch.testing.assert_close(out.float(), wide, rtol=1e-3, atol=0)


def test_fresh_norms_leave_the_plain_function_in_evaluation(narrow):
    torch.manual_seed(0)
    plain, normed = AlexNet(num_classes=5).eval(), AlexNet(num_classes=5, norms=NORM_NAMES).eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(normed(x), plain(x), rtol=1e-3, atol=1e-4)


def test_dropout_is_the_setting(narrow):
    for build in (AlexNet, AlexNet2012):
        model = build(num_classes=5, dropout=0.25)
        assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.25]


@pytest.mark.parametrize("build", [AlexNet, AlexNet2012])
def test_gradients_reach_every_parameter(narrow, build):
    torch.manual_seed(0)
    model = build(num_classes=5, dropout=0.0)
    F.cross_entropy(model(torch.randn(2, 3, 96, 96)), torch.tensor([0, 4])).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
