"""ResNet-18/34/50/101/152, version 1.5, with torchvision's state-dict keys, and two small residual nets.

In version 1.5, the 3x3 convolution of a bottleneck has the stride, instead of the preceding 1x1
convolution. The architecture is from He et al. 2015, "Deep Residual Learning for Image Recognition". The
zero γ at the end of each branch is from Goyal et al. 2017. These networks contain no accelerations; see
`models/acceleration`.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from torch import Tensor, nn

STAGE_CHANNELS = (64, 128, 256, 512)
# Channels of `FastResNet`: first convolution, then each stage.
FAST_CHANNELS = (64, 64, 256, 256)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """Returns a 1x1 convolution without bias."""
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """Returns a 3x3 convolution with padding and without bias, because a batch norm follows."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def make_downsample(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Returns the projection for a shortcut that changes the shape; None for an identity shortcut."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(conv1x1(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, of which the first has the stride."""

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = make_downsample(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.conv2(branch)
        shortcut = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.bn2(branch) + shortcut)
        return out


class Bottleneck(nn.Module):
    """Residual block of three convolutions: 1x1, 3x3 with the stride, 1x1 to `4 * channels`."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = conv1x1(in_channels, channels)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = conv1x1(channels, out_channels)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = make_downsample(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.conv3(branch)
        shortcut = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.bn3(branch) + shortcut)
        return out


Block = type[BasicBlock] | type[Bottleneck]

# Class of the blocks, and number of blocks in each of the four stages.
RESNET_LAYOUTS: dict[str, tuple[Block, tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def make_stage(
    block: Block, in_channels: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    """Returns a stage of `depth` blocks; the first block has the stride and changes the channels."""
    first = block(in_channels, channels, stride)
    rest = [block(channels * block.expansion, channels) for _ in range(depth - 1)]
    return nn.Sequential(first, *rest)


def init_weights(model: nn.Module, *, zero_init_gamma: bool) -> None:
    """Initializes convolutions with Kaiming's normal distribution (mode `fan_out`).

    Args:
        model: A residual net.
        zero_init_gamma: Set the last γ of each branch to 0. Every block then starts as its shortcut,
            and large learning rates work from the first step.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, BasicBlock) and zero_init_gamma:
            nn.init.zeros_(module.bn2.weight)
        elif isinstance(module, Bottleneck) and zero_init_gamma:
            nn.init.zeros_(module.bn3.weight)


class ResNet(nn.Module):
    """ResNet with four stages.

    Args:
        block: Class of the blocks, `BasicBlock` or `Bottleneck`.
        depths: Number of blocks in each stage.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem: `imagenet` (7x7 convolution with stride 2 and a pool) or `small` (3x3 convolution). Both
            have the same state-dict keys.
        zero_init_gamma: As in `init_weights`.
    """

    def __init__(
        self,
        block: Block,
        depths: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        stem: str = "imagenet",
        zero_init_gamma: bool = True,
    ) -> None:
        super().__init__()
        width = STAGE_CHANNELS[0]
        self.conv1: nn.Conv2d
        self.maxpool: nn.Module
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            assert stem == "small", stem
            self.conv1 = conv3x3(in_channels, width)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        out = [channels * block.expansion for channels in STAGE_CHANNELS]
        self.layer1 = make_stage(block, width, STAGE_CHANNELS[0], depths[0], stride=1)
        self.layer2 = make_stage(block, out[0], STAGE_CHANNELS[1], depths[1], stride=2)
        self.layer3 = make_stage(block, out[1], STAGE_CHANNELS[2], depths[2], stride=2)
        self.layer4 = make_stage(block, out[2], STAGE_CHANNELS[3], depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(out[3], num_classes)
        init_weights(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(x)))))

    def head(self, x: Tensor) -> Tensor:
        """Computes the logits from the output of the last stage."""
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class SmallResNet(nn.Module):
    """Residual net for images of 28 or 32 pixels that trains quickly on two CPU cores.

    The net has 599,290 parameters for one channel and ten classes. The architecture is the result of
    measurements. Convolutions of large activations cost most, so only a stem of 16 channels works at
    full resolution, and every stage halves the resolution. Only the last stage has a second block,
    because blocks cost least and help most there.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        zero_init_gamma: As in `init_weights`.
    """

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 1, zero_init_gamma: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = make_stage(BasicBlock, 16, 32, depth=1, stride=2)
        self.layer2 = make_stage(BasicBlock, 32, 64, depth=1, stride=2)
        self.layer3 = make_stage(BasicBlock, 64, 128, depth=2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(128, num_classes)
        init_weights(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.head(self.layer3(self.layer2(self.layer1(x))))

    def head(self, x: Tensor) -> Tensor:
        """Computes the logits from the output of the last stage."""
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class PooledConv(nn.Module):
    """3x3 convolution and max-pool, which halves the resolution, with batch norm and ReLU."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(in_channels, channels)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.maxpool(self.relu(self.bn(self.conv(x))))
        return pooled


class FastResNet(nn.Module):
    """Residual net for images of 32 pixels that trains in seconds on a GPU.

    The net has three stages, each with a pooled convolution and a residual block. Only two convolutions
    work at full resolution, and most of the arithmetic is at 16 × 16 and 8 × 8. The logits are divided by
    8, because the last layer's inputs are maxima, which are far from zero at the start.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of the first convolution and of each stage.
        zero_init_gamma: As in `init_weights`.
    """

    logit_scale: ClassVar[float] = 1 / 8

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        channels: tuple[int, int, int, int] = FAST_CHANNELS,
        zero_init_gamma: bool = True,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, channels[0])
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(PooledConv(before, after), BasicBlock(after, after))
            for before, after in itertools.pairwise(channels)
        )
        self.fc = nn.Linear(channels[-1], num_classes)
        init_weights(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.head(self.layer3(self.layer2(self.layer1(x))))

    def head(self, x: Tensor) -> Tensor:
        """Computes the logits from the output of the last stage."""
        logits: Tensor = self.fc(x.amax((2, 3))) * self.logit_scale
        return logits
