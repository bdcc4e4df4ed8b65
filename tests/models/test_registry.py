"""From name to network, and what cannot be built."""

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.registry import create_model
from paceline.models.settings import MODEL_NAMES, ModelSettings

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet_tiny": 727_288,
    "alexnet": 61_100_840,
    "alexnet2012": 60_965_224,
    "alexnet_bn": 61_103_656,
}


def test_every_name_has_a_published_size_here():
    assert set(PARAMETERS) == set(MODEL_NAMES)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_name_builds_its_model(name):
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=1000)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)


def test_unknown_name_is_one_line_with_a_suggestion():
    settings = ModelSettings()
    object.__setattr__(settings, "name", "alexnet_bm")
    with pytest.raises(ConfigError, match=r"model\.name = 'alexnet_bm'.*did you mean 'alexnet_bn'"):
        create_model(settings, num_classes=10)


@pytest.mark.parametrize("name", ["alexnet", "alexnet2012", "alexnet_bn"])
def test_images_too_small_for_alexnet_are_refused(name):
    with pytest.raises(ConfigError, match="at least 63 pixels, and these have 28"):
        create_model(ModelSettings(name=name), num_classes=10, image_size=28)


@pytest.mark.parametrize(
    ("stem", "image_size", "kernel"), [("auto", 32, 3), ("auto", 224, 7), ("imagenet", 32, 7)]
)
def test_stem_setting_reaches_the_model(stem, image_size, kernel):
    with torch.device("meta"):
        settings = ModelSettings(name="resnet18", stem=stem)
        model = create_model(settings, num_classes=10, in_channels=1, image_size=image_size)
    assert model.conv1.weight.shape == (64, 1, kernel, kernel)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet_tiny"])
@pytest.mark.parametrize("zero", [True, False])
def test_gamma_setting_reaches_the_model(name, zero):
    settings = ModelSettings(name=name, zero_init_gamma=zero)
    model = create_model(settings, num_classes=10, image_size=32)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert any(not norm.weight.any() for norm in norms) is zero


@pytest.mark.parametrize("name", ["alexnet", "alexnet2012", "alexnet_bn"])
def test_dropout_setting_reaches_the_model(name):
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name, dropout=0.1), num_classes=10)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1}


def test_same_seed_builds_the_same_weights():
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(create_model(ModelSettings(name="resnet_tiny"), num_classes=10).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_norm_after_pool5_can_be_left_out() -> None:
    with_it = create_model(ModelSettings(name="alexnet_bn"), num_classes=4)
    without = create_model(ModelSettings(name="alexnet_bn", pool5_norm=False), num_classes=4)
    missing = set(with_it.state_dict()) - set(without.state_dict())
    assert {key.split(".")[1] for key in missing} == {"bn_pool5"}
    with pytest.raises(ConfigError, match="resnet18 has no batch norm after pool5"):
        ModelSettings(name="resnet18", pool5_norm=False)
