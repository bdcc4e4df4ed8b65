"""Nets of the comparison, which are not part of Paceline: a small ViT, a CNN without norms, a mixer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PlainCNN(nn.Module):
    """Six convolutions and a linear layer without any norm."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for channels, stride in ((32, 1), (32, 2), (64, 1), (64, 2), (128, 1), (128, 2)):
            convolution = nn.Conv2d(width, channels, 3, stride, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            layers += [convolution, nn.ReLU()]
            width = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pool(self.features(x)).flatten(1))
        return logits


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        shape = (images, tokens, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(images, tokens, width))
        return out


class _Perceptron(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


class _Block(nn.Module):
    """Residual block of a transformer, or of a mixer if `tokens` is given."""

    def __init__(self, width: int, tokens: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.is_mixer = tokens > 0
        self.tokens: nn.Module = _Perceptron(tokens, 2 * tokens) if tokens else _Attention(width, 4)
        self.channels = _Perceptron(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = self.tokens(y.transpose(1, 2)).transpose(1, 2) if self.is_mixer else self.tokens(y)
        x = x + y
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class PatchNet(nn.Module):
    """Patches of 4 × 4 pixels, then blocks of a transformer (ViT) or of a mixer, then the mean."""

    def __init__(
        self, num_classes: int, in_channels: int, image_size: int, *, mixer: bool,
        width: int = 96, depth: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        tokens = (image_size // 4) ** 2
        self.patches = nn.Conv2d(in_channels, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, tokens, width))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.ModuleList(_Block(width, tokens if mixer else 0) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.fc(self.norm(x).mean(1))
        return logits


def vit(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Returns a ViT of four blocks of width 96."""
    return PatchNet(num_classes, in_channels, image_size, mixer=False)


def mixer(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Returns a mixer of the same size, for the exploration: the ViT is held out."""
    return PatchNet(num_classes, in_channels, image_size, mixer=True)


def cnn(num_classes: int, in_channels: int) -> nn.Module:
    """Returns the CNN without norms."""
    return PlainCNN(num_classes, in_channels)


NETS: dict[str, str | Callable[..., nn.Module]] = {
    "resnet_tiny": "resnet_tiny", "vit": vit, "cnn": cnn, "mixer": mixer
}  # fmt: skip
