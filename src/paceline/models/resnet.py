"""ResNet-18/34/50/101/152, version 1.5, under torchvision's state-dict keys.

In: images (N, in_channels, H, W). Out: logits (N, num_classes). Version 1.5 strides in the 3x3
convolution of a bottleneck, not in the 1x1 before it. He et al. 2015, "Deep Residual Learning for
Image Recognition"; zero gamma at the end of each branch from Goyal et al. 2017.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.residual_block import (
    ResidualBlock,
    Uses,
    fused_stem,
    projection,
    split_uses,
)

STAGE_CHANNELS = (64, 128, 256, 512)
PADDED_CHANNELS = 4


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

    def forward(self, x: Uses) -> Uses:
        branch_in, shortcut_in = split_uses(x)
        branch = self.norm_relu(self.conv1(branch_in), self.bn1)
        return self.join(self.conv2(branch), self.bn2, self.shortcut(shortcut_in))


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

    def forward(self, x: Uses) -> Uses:
        branch_in, shortcut_in = split_uses(x)
        branch = self.norm_relu(self.conv1(branch_in), self.bn1)
        branch = self.norm_relu(self.conv2(branch), self.bn2)
        return self.join(self.conv3(branch), self.bn3, self.shortcut(shortcut_in))


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
    """He's normal over fan-out for convolutions; gamma = 1 except, if asked, at each branch's end.

    With gamma = 0 there every block starts as its shortcut, so that a deep net starts as a shallow
    one: it bears the large learning rates of large batches from the first step.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, BasicBlock | Bottleneck) and zero_init_gamma:
            nn.init.zeros_(module.last_norm.weight)


class ResNet(nn.Module):
    """A residual net. The stems `imagenet` and `small` differ in conv1's shape, not in the keys."""

    fused = False
    pads_images: bool

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
        self.pads_images = in_channels == 3
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
        maps, _ = split_uses(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x))))))
        return self.head(maps)

    def stem(self, x: Tensor) -> Uses:
        """First convolution to first block. In the fused form images may have a fourth channel of
        zeros, which GPUs read faster than three."""
        if self.fused and self.pads_images and x.shape[1] == PADDED_CHANNELS:
            weight = F.pad(self.conv1.weight, (0, 0, 0, 0, 0, 1))
            x = F.conv2d(x, weight, None, self.conv1.stride, self.conv1.padding)
        else:
            x = self.conv1(x)
        if not self.fused:
            maps: Tensor = self.maxpool(self.relu(self.bn1(x)))
            return maps
        return fused_stem(x, self.bn1, pooled=isinstance(self.maxpool, nn.MaxPool2d))

    def head(self, maps: Tensor) -> Tensor:
        """Average over each map, then the linear layer."""
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits
