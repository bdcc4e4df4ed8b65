"""ResNets: published parameter counts, torchvision's keys, version 1.5, zero gamma, stems."""

import pytest
import torch
from torch import nn

from paceline.models.resnet import RESNET_LAYOUTS, BasicBlock, Bottleneck, ResNet

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def build(name, **options):
    return ResNet(*RESNET_LAYOUTS[name], **options)


def torchvision_keys(convs_per_block, depths):
    """The key names by rule, written apart from the model's own code."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    keys = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{part}" for part in norm}
    for stage, depth in enumerate(depths, start=1):
        for block in range(depth):
            at = f"layer{stage}.{block}"
            for number in range(1, convs_per_block + 1):
                keys |= {f"{at}.conv{number}.weight"} | {f"{at}.bn{number}.{p}" for p in norm}
            # Only bottlenecks change the number of channels in the first stage.
            if block == 0 and (stage > 1 or convs_per_block == 3):
                keys |= {f"{at}.downsample.0.weight"} | {f"{at}.downsample.1.{p}" for p in norm}
    return keys


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = build(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_keys_are_torchvisions(name):
    with torch.device("meta"):
        model = build(name)
    block, depths = RESNET_LAYOUTS[name]
    assert set(model.state_dict()) == torchvision_keys(3 if block is Bottleneck else 2, depths)


def test_small_stem_changes_shapes_not_keys():
    with torch.device("meta"):
        large, small = build("resnet18"), build("resnet18", stem="small", in_channels=1)
    assert large.state_dict().keys() == small.state_dict().keys()
    assert large.conv1.weight.shape == (64, 3, 7, 7)
    assert small.conv1.weight.shape == (64, 1, 3, 3)


@pytest.mark.parametrize(("stem", "last_pixels"), [("imagenet", 2), ("small", 8)])
def test_stem_sets_how_far_the_maps_shrink(stem, last_pixels):
    seen = []
    with torch.device("meta"):
        model = build("resnet18", stem=stem)
        model.layer4.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape)))
        model(torch.empty(2, 3, 64, 64))
    assert seen == [(2, 512, last_pixels, last_pixels)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_output_shape_for_any_size_and_channels(name):
    with torch.device("meta"):
        model = build(name, num_classes=7, in_channels=5)
        assert model(torch.empty(2, 5, 224, 224)).shape == (2, 7)
        assert model(torch.empty(2, 5, 97, 130)).shape == (2, 7)


def test_bottleneck_strides_in_the_3x3():
    with torch.device("meta"):
        first = build("resnet50").layer2[0]
    assert [c.stride for c in (first.conv1, first.conv2, first.conv3)] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_zero_gamma_makes_every_block_its_shortcut(block):
    torch.manual_seed(0)
    model = ResNet(block, (1, 2, 1, 1), stem="small", zero_init_gamma=True, num_classes=3)
    compared = []

    def compare(module, inputs, output):
        # The ReLUs work in place, but never on the input of a block.
        shortcut = inputs[0] if module.downsample is None else module.downsample(inputs[0])
        compared.append(torch.equal(output, torch.relu(shortcut)))

    for module in model.modules():
        if isinstance(module, block):
            module.register_forward_hook(compare)
    model(torch.randn(4, 3, 16, 16))
    assert compared == [True] * 5


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_zero_gamma_can_be_switched_off(name):
    model = build(name, zero_init_gamma=False)
    gammas = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(bool((gamma == 1).all()) for gamma in gammas)


def test_zero_gamma_touches_only_the_last_norm_of_each_branch():
    model = build("resnet50")
    zeros = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) and not module.weight.any()
    }
    assert len(zeros) == sum(RESNET_LAYOUTS["resnet50"][1])
    assert all(name.endswith(".bn3") for name in zeros)


def test_convolutions_start_with_hes_deviation_over_fan_out():
    torch.manual_seed(0)
    weight = build("resnet18").layer4[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def test_gradients_reach_every_parameter_that_zero_gamma_leaves_open():
    torch.manual_seed(0)
    model = build("resnet18", stem="small", num_classes=4, zero_init_gamma=False)
    model(torch.randn(2, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_images_of_other_channels_are_refused_and_hooks_of_the_first_layer_fire() -> None:
    model = ResNet(*RESNET_LAYOUTS["resnet18"], num_classes=3, stem="small")
    seen: list[int] = []
    model.conv1.register_forward_hook(lambda *call: seen.append(1))
    model(torch.zeros(2, 3, 8, 8))
    assert seen == [1]
    for channels in (1, 4, 7):
        with pytest.raises(RuntimeError, match="channels"):
            model(torch.zeros(2, channels, 8, 8))
