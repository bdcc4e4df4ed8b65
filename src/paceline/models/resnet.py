"""ResNet-18/34/50/101/152, version 1.5, with torchvision's state-dict keys, and two small residual nets.

Version 1.5 puts the stride into the 3x3 convolution of a bottleneck instead of the 1x1 before it. He
et al. 2015, "Deep Residual Learning for Image Recognition"; zero gamma at the end of each branch from
Goyal et al. 2017. Accelerations replace parts of these networks from outside (`models/acceleration`).
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from torch import Tensor, nn

STAGE_CHANNELS = (64, 128, 256, 512)
# `FastResNet`: first convolution, then each stage.
FAST_CHANNELS = (64, 64, 256, 256)


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block that changes size; None for an identity shortcut."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResidualBlock(nn.Module):
    """relu(norm(branch(x)) + shortcut(x))."""

    relu: nn.ReLU
    downsample: nn.Sequential | None

    def branch(self, x: Tensor) -> Tensor:
        """All layers of the branch before its last norm."""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        maps = self.branch(x)
        shortcut = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.last_norm(maps) + shortcut)
        return out


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """No bias: the batch norm that follows has its own."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions, the first with the stride."""

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = projection(in_channels, channels, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.conv2(x)
        return out


class Bottleneck(ResidualBlock):
    """1x1 down, 3x3 with the stride, 1x1 up to four times the channels."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(in_channels, out_channels, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.conv3(x)
        return out


Block = type[BasicBlock] | type[Bottleneck]

# Blocks in each of the four stages.
RESNET_LAYOUTS: dict[str, tuple[Block, tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def build_stage(
    block: Block, in_channels: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    """`depth` blocks in a row; the first takes the stride and the change of channels."""
    first = block(in_channels, channels, stride)
    rest = [block(channels * block.expansion, channels) for _ in range(depth - 1)]
    return nn.Sequential(first, *rest)


def init_residual(model: nn.Module, *, zero_init_gamma: bool) -> None:
    """Kaiming normal over fan-out for convolutions. With `zero_init_gamma` the last γ of each branch
    is 0, so every block starts as its shortcut and large learning rates work from the first step."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, BasicBlock | Bottleneck) and zero_init_gamma:
            nn.init.zeros_(module.last_norm.weight)


class ResNet(nn.Module):
    """The stems `imagenet` and `small` differ in the shape of conv1, not in the state-dict keys."""

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
        grown = [channels * block.expansion for channels in STAGE_CHANNELS]
        self.layer1 = build_stage(block, width, STAGE_CHANNELS[0], depths[0], stride=1)
        self.layer2 = build_stage(block, grown[0], STAGE_CHANNELS[1], depths[1], stride=2)
        self.layer3 = build_stage(block, grown[1], STAGE_CHANNELS[2], depths[2], stride=2)
        self.layer4 = build_stage(block, grown[2], STAGE_CHANNELS[3], depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(grown[3], num_classes)
        init_residual(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(x)))))

    def head(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


class SmallResNet(nn.Module):
    """A residual net for images of 28 or 32 pixels that trains quickly on two CPU cores.

    599,290 parameters for one channel and ten classes. The shape was found by measurement:
    convolutions cost most on large maps, so only a stem of 16 channels sees the full image, every
    stage halves the maps, and the only second block is in the last stage, where it is cheapest and
    helps most.
    """

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 1, zero_init_gamma: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = build_stage(BasicBlock, 16, 32, depth=1, stride=2)
        self.layer2 = build_stage(BasicBlock, 32, 64, depth=1, stride=2)
        self.layer3 = build_stage(BasicBlock, 64, 128, depth=2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(128, num_classes)
        init_residual(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.head(self.layer3(self.layer2(self.layer1(x))))

    def head(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


class PooledConv(nn.Module):
    """A 3x3 convolution, norm, ReLU and a max-pool that halves the map."""

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
    """A residual net for images of 32 pixels that trains in seconds on a GPU.

    Three stages of a pooled convolution and a residual block. Only two convolutions see the full image,
    and most of the arithmetic is at 16 × 16 and 8 × 8. The logits are divided by 8, because the inputs
    of the last layer, the largest values of the maps, are far from zero at the start.
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
        init_residual(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.head(self.layer3(self.layer2(self.layer1(x))))

    def head(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.fc(maps.amax((2, 3))) * self.logit_scale
        return logits
