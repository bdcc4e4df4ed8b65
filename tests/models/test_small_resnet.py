"""The small net: size, shapes, zero gamma, and that it learns."""

import pytest
import torch
import torch.nn.functional as F

from paceline.models.resnet import SmallResNet


def test_parameter_count():
    with torch.device("meta"):
        model = SmallResNet(num_classes=10, in_channels=1)
    assert sum(p.numel() for p in model.parameters()) == 599_290


@pytest.mark.parametrize(("in_channels", "pixels"), [(1, 28), (3, 32)])
def test_output_shape(in_channels, pixels):
    with torch.device("meta"):
        model = SmallResNet(num_classes=7, in_channels=in_channels)
        assert model(torch.empty(2, in_channels, pixels, pixels)).shape == (2, 7)


def test_keys_follow_torchvisions_pattern():
    keys = set(SmallResNet().state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight"} <= keys
    assert {"layer3.1.conv2.weight", "fc.weight", "fc.bias"} <= keys
    assert "layer3.1.downsample.0.weight" not in keys


@pytest.mark.parametrize("zero", [True, False])
def test_zero_gamma_is_a_switch(zero):
    model = SmallResNet(zero_init_gamma=zero)
    for block in (model.layer1[0], model.layer2[0], model.layer3[0], model.layer3[1]):
        assert bool(block.bn2.weight.any()) is not zero


def test_learns_to_tell_two_patterns_apart():
    torch.manual_seed(0)
    labels = torch.arange(16) % 2
    images = 0.3 * torch.randn(16, 1, 28, 28)
    images[labels == 1, :, :, 14:] += 1.0
    model = SmallResNet(num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
