"""ResNet-18/34/50/101/152, version 1.5, with torchvision's state-dict keys, and two small residual nets.

Version 1.5 puts the stride into the 3x3 convolution of a bottleneck instead of the 1x1 before it. He
et al. 2015, "Deep Residual Learning for Image Recognition"; zero gamma at the end of each branch from
Goyal et al. 2017. Blocks have a plain form, torch's operators on any device and under torch.compile,
and a fused form, our Triton kernels in training mode on a GPU.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from paceline.models.recompute import RecomputedMap, not_stored, recomputed_norm, switch_forms
from paceline.models.stem import TakesImages, convolve_images

if TYPE_CHECKING:
    from paceline.models.fused_blocks import Pending

# A feature map, or the same map twice: for the branch and for the shortcut (see `norm_act_twice`), or
# one that is not stored, or one that its user computes.
Uses: TypeAlias = "Tensor | tuple[Tensor, Tensor] | RecomputedMap | Pending"
STAGE_CHANNELS = (64, 128, 256, 512)
# `FastResNet`: first convolution, then each stage.
FAST_CHANNELS = (64, 64, 256, 256)


def norm_can_fuse(module: nn.Module) -> bool:
    """Whether a batch norm has the form that the fused kernels compute: training mode, running
    averages of fixed momentum, γ and β. True for other modules. Does not import Triton."""
    if not isinstance(module, nn.BatchNorm2d):
        return True
    return (
        module.training
        and module.momentum is not None
        and module.track_running_stats
        and module.affine
    )


def split_uses(x: Uses) -> tuple[Tensor, Tensor]:
    if isinstance(x, Tensor):
        return x, x
    if isinstance(x, RecomputedMap):
        return x.branch, x.shortcut
    return x if isinstance(x, tuple) else x.output()


def convolve(convolution: nn.Module, x: Uses, *, shortcut: bool = False) -> Tensor:
    """The convolution of the branch, or that of the shortcut."""
    maps = split_uses(x)[int(shortcut)]
    with not_stored(x):
        out: Tensor = convolution(maps)
        return out


def computed(x: Uses) -> Uses:
    """A map that was left to its user, or `x` itself."""
    return x if isinstance(x, Tensor | RecomputedMap) else split_uses(x)


def norm_relu(
    x: Tensor, norm: nn.BatchNorm2d, relu: nn.Module, shortcut: Tensor | None = None, *,
    fused: bool, recompute: bool, twice: bool = False,
) -> Uses:  # fmt: skip
    """relu(norm(x) + shortcut). `twice`: for branch and shortcut of a block. `recompute`: not stored,
    for which the shortcut has to be."""
    recompute = recompute and torch.is_grad_enabled()
    if fused:
        from paceline.models.fused import can_fuse, norm_act, norm_act_recomputed, norm_act_twice

        if can_fuse(x, norm):
            form = norm_act_recomputed if recompute else norm_act_twice if twice else norm_act
            return form(x, norm, shortcut)
    if recompute:
        return recomputed_norm(x, norm, relu, shortcut)
    maps: Tensor = norm(x)
    out: Tensor = relu(maps if shortcut is None else maps + shortcut)
    return out


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block that changes size; None for an identity shortcut."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResidualBlock(nn.Module):
    """Base of all blocks. `fuse_norms` sets `fused` on every block of a model or on none
    and `fuse_products` sets `fused_products`."""

    fused = False
    fused_products = False
    recompute = False
    relu: nn.ReLU
    downsample: nn.Sequential | None

    def branch(self) -> tuple[tuple[nn.Conv2d, nn.BatchNorm2d], ...]:
        """The convolutions in their order, each with the norm behind it."""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.branch()[-1][1]

    def forward(self, x: Uses) -> Uses:
        if self.fused and self.fused_products:
            from paceline.models.fused_blocks import can_fuse_block, fused_block

            if can_fuse_block(self, x):
                return fused_block(self, x)
        maps = x = computed(x)
        *inner, (last, last_norm) = self.branch()
        for convolution, norm in inner:
            maps = self.norm_relu(convolve(convolution, maps), norm)
        return self.join(convolve(last, maps), last_norm, x)

    def norm_relu(self, x: Tensor, norm: nn.BatchNorm2d) -> Uses:
        return norm_relu(x, norm, self.relu, fused=self.fused, recompute=self.recompute)

    def shortcut(self, x: Uses) -> Tensor:
        if self.downsample is None:
            return split_uses(x)[1]
        convolution, norm = self.downsample
        maps = convolve(convolution, x, shortcut=True)
        if self.fused:
            from paceline.models.fused import can_fuse, norm_act

            assert isinstance(norm, nn.BatchNorm2d)
            if can_fuse(maps, norm):
                return norm_act(maps, norm, relu=False)
        out: Tensor = norm(maps)
        return out

    def join(self, x: Tensor, norm: nn.BatchNorm2d, inputs: Uses) -> Uses:
        """Last norm of the branch, sum with the shortcut, last ReLU."""
        shortcut_is_stored = self.downsample is None and not isinstance(inputs, RecomputedMap)
        return norm_relu(
            x, norm, self.relu, self.shortcut(inputs),
            fused=self.fused, recompute=self.recompute and shortcut_is_stored, twice=True,
        )  # fmt: skip


def fused_norm_pool(x: Tensor, norm: nn.BatchNorm2d) -> Uses:
    """Norm, ReLU and a 3 × 3 max-pool of stride 2. The map before the pool is not stored."""
    from paceline.models.fused import can_fuse, norm_act_pool

    if not can_fuse(x, norm):
        return nn.functional.max_pool2d(nn.functional.relu(norm(x)), 3, 2, 1)
    return norm_act_pool(x, norm)


def fuse_products(model: nn.Module, fused: bool = True, *, cudnn: bool = False) -> int:
    """Switches the fused convolutions of every `Bottleneck` and, with `cudnn`, of every other block,
    which only cuDNN has fused kernels for; returns the number of these blocks. They need the fused
    norms."""
    count = 0
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            has_forms = cudnn or isinstance(module, Bottleneck)
            module.fused_products = fused and has_forms
            count += has_forms
    return count


def fuse_norms(model: nn.Module, fused: bool = True) -> int:
    """Switches every module of `model` that has a fused form; returns their number."""
    return switch_forms(model, "fused", fused)


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

    def branch(self) -> tuple[tuple[nn.Conv2d, nn.BatchNorm2d], ...]:
        return (self.conv1, self.bn1), (self.conv2, self.bn2)


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

    def branch(self) -> tuple[tuple[nn.Conv2d, nn.BatchNorm2d], ...]:
        return (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)


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


class ResNet(TakesImages):
    """The stems `imagenet` and `small` differ in the shape of conv1, not in the state-dict keys."""

    fused = False
    recompute = False

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

    @property
    def first_convolution(self) -> nn.Module:
        return self.conv1

    def forward(self, x: Tensor) -> Tensor:
        maps, _ = split_uses(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x))))))
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits

    def stem(self, x: Tensor) -> Uses:
        """All layers before the first block."""
        fused = self.fused
        x = convolve_images(self.conv1, x, padded=fused and self.pads_images)
        if not isinstance(self.maxpool, nn.MaxPool2d):
            return norm_relu(
                x, self.bn1, self.relu, fused=fused, recompute=self.recompute, twice=True
            )
        if fused:
            return fused_norm_pool(x, self.bn1)
        maps: Tensor = self.maxpool(self.relu(self.bn1(x)))
        return maps


class SmallResNet(nn.Module):
    """A residual net for images of 28 or 32 pixels that trains quickly on two CPU cores.

    599,290 parameters for one channel and ten classes. The shape was found by measurement:
    convolutions cost most on large maps, so only a stem of 16 channels sees the full image, every
    stage halves the maps, and the only second block is in the last stage, where it is cheapest and
    helps most.
    """

    recompute = False

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
        stem = norm_relu(self.conv1(x), self.bn1, self.relu, fused=False, recompute=self.recompute)
        maps, _ = split_uses(self.layer3(self.layer2(self.layer1(stem))))
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


class PooledConv(nn.Module):
    """A 3x3 convolution, norm, ReLU and a max-pool that halves the map."""

    fused = False

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(in_channels, channels)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Uses) -> Uses:
        maps = convolve(self.conv, x)
        if self.fused:
            return fused_norm_pool(maps, self.bn)
        pooled: Tensor = self.maxpool(self.relu(self.bn(maps)))
        return pooled


class FastResNet(TakesImages):
    """A residual net for images of 32 pixels that trains in seconds on a GPU.

    Three stages of a pooled convolution and a residual block. Only two convolutions see the full image,
    and most of the arithmetic is at 16 × 16 and 8 × 8. The logits are divided by 8, because the inputs
    of the last layer, the largest values of the maps, are far from zero at the start.
    """

    fused = False
    recompute = False
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

    @property
    def first_convolution(self) -> nn.Module:
        return self.conv1

    def forward(self, x: Tensor) -> Tensor:
        x = convolve_images(self.conv1, x, padded=self.fused and self.pads_images)
        stem = norm_relu(
            x, self.bn1, self.relu, fused=self.fused, recompute=self.recompute, twice=True
        )
        last = self.layer3(self.layer2(self.layer1(stem)))
        maps, _ = split_uses(last)
        with not_stored(last):
            largest = maps.amax((2, 3))
        logits: Tensor = self.fc(largest) * self.logit_scale
        return logits
