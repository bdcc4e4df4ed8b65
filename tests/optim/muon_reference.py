"""Muon in float64, for one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

ETA, DECAY = 0.3, 0.1


class Reference:
    """One matrix in float64, from the equation; singular values by decomposition."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double()
        self.momentum = torch.zeros_like(self.weight)

    def step(self, gradient: Tensor, lr: float, m: float, nesterov: bool) -> None:
        g, w = gradient.detach().double(), self.weight
        self.momentum = m * self.momentum + (1 - m) * g
        v = (1 - m) * g + m * self.momentum if nesterov else self.momentum
        u, s, vt = torch.linalg.svd(v.flatten(1), full_matrices=False)
        values = s / s.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        direction = ((u * values) @ vt).view_as(v) * (v.norm() / values.norm())
        ratio = ETA * w.norm() / (direction.norm() + DECAY * w.norm())
        self.weight = w - lr * ratio * (direction + DECAY * w)
