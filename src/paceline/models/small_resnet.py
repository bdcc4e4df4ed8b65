"""`SmallResNet`: a residual net for images of 28 or 32 pixels that trains quickly on two CPU cores.

In: images (N, in_channels, H, W). Out: logits (N, num_classes). 599,290 parameters for one channel
and ten classes. The shape is what measurement on two cores left over: convolutions cost most where
the maps are large, so only a stem of 16 channels sees the full image, every stage halves the maps,
and the second block stands where it is cheapest and helps most, in the last stage.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.models.residual_block import split_uses
from paceline.models.resnet import BasicBlock, build_stage, conv3x3, init_residual

STEM_CHANNELS = 16
STAGE_CHANNELS = (32, 64, 128)
STAGE_DEPTHS = (1, 1, 2)


class SmallResNet(nn.Module):
    """A 3x3 stem at full size, three stages of basic blocks, global average pool, linear head."""

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 1, zero_init_gamma: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, STEM_CHANNELS)
        self.bn1 = nn.BatchNorm2d(STEM_CHANNELS)
        self.relu = nn.ReLU(inplace=True)
        first, second, third = STAGE_CHANNELS
        self.layer1 = build_stage(BasicBlock, STEM_CHANNELS, first, STAGE_DEPTHS[0], stride=2)
        self.layer2 = build_stage(BasicBlock, first, second, STAGE_DEPTHS[1], stride=2)
        self.layer3 = build_stage(BasicBlock, second, third, STAGE_DEPTHS[2], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(third, num_classes)
        init_residual(self, zero_init_gamma=zero_init_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        maps, _ = split_uses(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits
