"""A small network for own loops, and batches that differ from rank to rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Batch norm, dropout, and a layer that only some batches use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(dropout)
        self.extra = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, images: Tensor, extra: bool = True) -> Tensor:
        out = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        if extra:
            out = self.extra(out)
        return self.fc(self.drop(out))


def make_net(seed: int = 0, dropout: float = 0.0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(6, 3, 8, 8, generator=generator)
    return images, torch.randint(0, 4, (6,), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])
