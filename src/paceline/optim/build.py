"""From settings to an optimizer.

In: parameter groups as `paceline.models.parameter_groups` makes them. Out: a torch Optimizer, whose
rate the training loop sets before every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.optim.settings import OptimSettings


def create_optimizer(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    """Momentum SGD; the fused kernel where parameters lie on a GPU."""
    on_cuda = all(p.is_cuda for group in groups for p in group["params"])
    return torch.optim.SGD(
        list(groups),
        lr=lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=on_cuda or None,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
