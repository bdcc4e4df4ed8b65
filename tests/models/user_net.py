"""A network as a user writes it, unlike ours: tied weights, dropout, several outputs, no batch norm.

Named in settings as `models.user_net:make_net`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24


class UserNet(nn.Module):
    """Classifies, and reconstructs its features through the transposed weights of its encoder."""

    def __init__(self, num_classes: int, in_channels: int = 1, several: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, WIDTH, 7, stride=7)
        self.norm = nn.LayerNorm(WIDTH)
        self.encode = nn.Linear(WIDTH, WIDTH, bias=False)
        self.encode_again = nn.Linear(WIDTH, WIDTH)
        self.encode_again.weight = self.encode.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, num_classes)
        self.several = several

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        features = self.norm(self.patches(images).flatten(2).mean(2))
        hidden = self.drop(self.encode_again(self.encode(features).relu()) * self.scale)
        logits: Tensor = self.head(hidden)
        if not self.several:
            return logits
        back = F.linear(hidden, self.encode.weight.t())
        return {"features": features, "logits": logits, "back": back}


def make_net(num_classes: int, in_channels: int, several: bool = False) -> nn.Module:
    """Creates the net; has no argument for the image size."""
    return UserNet(num_classes, in_channels, several)


def loss_of_both(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Returns the loss of each sample from two outputs."""
    wrong = F.cross_entropy(outputs["logits"].float(), targets, reduction="none")
    apart = (outputs["back"] - outputs["features"].detach()).float().square().mean(1)
    return wrong + 0.1 * apart
