"""Implements LARS, Muon, AdamW and LAMB in float64 from their equations, with helpers for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.optim import MasterOptimizer

NAMES = ("lr_in_momentum", "nesterov", "clip", "adapt", "weight_decay", "eps")
OPTIONS = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(
        (True, False), (True, False), (True, False), (True, False), (0.0, 0.1), (0.0, 0.5)
    )
]
KINDS = (torch.float32, torch.float16, torch.bfloat16)
# λ is about 0.3 with these values: the rates lie on both sides of it, so that `clip` applies sometimes.
RATES = (0.9, 0.1, 0.4)
ETA, DECAY = 0.3, 0.1


class LarsReference:
    """One parameter: weight, momentum and last ratio."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double().clone()
        self.momentum = torch.zeros_like(self.weight)
        self.ratio = 1.0

    def step(self, gradient: Tensor, lr: float, options: dict[str, Any], m: float = 0.9) -> None:
        g, w, decay = gradient.detach().double(), self.weight, options["weight_decay"]
        g_norm, w_norm = float(g.norm()), float(w.norm())
        ratio = 1.0
        if options["adapt"] and g_norm > 0 and w_norm > 0:
            ratio = ETA * w_norm / (g_norm + decay * w_norm + options["eps"])
            if options["clip"]:
                ratio = min(ratio / lr, 1.0)
        inside, outside = (lr, 1.0) if options["lr_in_momentum"] else (1.0, lr)
        push = inside * ratio * (g + decay * w)
        self.momentum = m * self.momentum + push
        direction = push + m * self.momentum if options["nesterov"] else self.momentum
        self.weight = w - outside * direction
        self.ratio = ratio


def orthogonal_reference(matrix: Tensor) -> Tensor:
    """U·p(S)·Vᵀ with the norm of U·S·Vᵀ, where p is the iteration on numbers."""
    u, s, vt = torch.linalg.svd(matrix.double().flatten(1), full_matrices=False)
    values = s / s.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return ((u * values) @ vt).view_as(matrix) * (s.norm() / values.norm())


class MuonReference:
    """One matrix."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double()
        self.momentum = torch.zeros_like(self.weight)

    def step(self, gradient: Tensor, lr: float, m: float, nesterov: bool) -> None:
        g, w = gradient.detach().double(), self.weight
        self.momentum = m * self.momentum + (1 - m) * g
        v = (1 - m) * g + m * self.momentum if nesterov else self.momentum
        direction = orthogonal_reference(v)
        ratio = ETA * w.norm() / (direction.norm() + DECAY * w.norm())
        self.weight = w - lr * ratio * (direction + DECAY * w)


class AdamReference:
    """One parameter of AdamW, or with `adapts` of LAMB."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().cpu().double().numpy().copy()
        self.first, self.second = np.zeros_like(self.weight), np.zeros_like(self.weight)
        self.steps, self.ratio = 0, 1.0

    def step(
        self, gradient: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float,
        *, adapts: bool = False, clip: bool = False,
    ) -> None:  # fmt: skip
        g = gradient.detach().cpu().double().numpy()
        self.steps += 1
        self.first = betas[0] * self.first + (1 - betas[0]) * g
        self.second = betas[1] * self.second + (1 - betas[1]) * g * g
        m = self.first / (1 - betas[0] ** self.steps)
        v = self.second / (1 - betas[1] ** self.steps)
        u = m / (np.sqrt(v) + eps) + decay * self.weight
        norms = np.sqrt(np.sum(self.weight**2)), np.sqrt(np.sum(u**2))
        self.ratio = norms[0] / norms[1] if adapts and min(norms) > 0 else 1.0
        if adapts and clip:
            self.ratio = min(self.ratio, 1.0)
        self.weight = self.weight - lr * self.ratio * u


def parameters(*kinds: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """One parameter of another shape for each format, drawn from `seed`."""
    shapes = [(6, 5, 3, 3), (40,), (7, 11), (), (3, 1, 5)]
    draw = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=draw).to(kind))
        for shape, kind in zip(shapes, kinds, strict=False)
    ]


def fill_gradients(parameters: Sequence[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(1000 + seed)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=draw) * scale).to(p.dtype)


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def run(optimizer: MasterOptimizer, ps: Sequence[nn.Parameter], steps: Sequence[int]) -> None:
    for step in steps:
        fill_gradients(ps, step)
        optimizer.step()


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Compares within fp32 rounding of the largest value, because elements near 0 cancel."""
    error = float((found.detach().double().cpu() - expected.detach().double().cpu()).abs().max())
    assert error <= tolerance * max(float(expected.detach().abs().max()), 1e-30), error


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns copies of all parameters and all state except counts of skipped steps."""
    held = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = [value for key, value in optimizer.state[p].items() if key != "steps"]
            held += [tensor.detach().clone() for tensor in (p, *state)]
    return held


def bits_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Compares bits, signs of zero included."""
    ints = {2: torch.int16, 4: torch.int32}
    return len(left) == len(right) and all(
        torch.equal(a.view(ints[a.element_size()]), b.view(ints[b.element_size()]))
        for a, b in zip(left, right, strict=True)
    )


def check_bad_gradient(
    ps: Sequence[nn.Parameter], optimizer: MasterOptimizer, which: int, poison: float
) -> None:
    """Checks that a step with a non-finite gradient changes no bit, and that the next step works."""
    with torch.no_grad():
        ps[0].view(-1)[0] = -0.0  # a product with 0 would change its sign
    before = everything(optimizer)
    gradient = grad_of(ps[which])
    gradient.view(-1)[-1] = poison
    optimizer.step()
    assert (int(optimizer.overflow), optimizer.nonfinite()) == (1, [which])
    assert bits_equal(everything(optimizer), before)
    gradient.view(-1)[-1] = 0.25
    optimizer.step()
    assert (int(optimizer.overflow), optimizer.nonfinite()) == (0, [])
    assert not bits_equal(everything(optimizer), before)
    assert all(torch.isfinite(tensor).all() for tensor in everything(optimizer))


def check_switches(optimizer: MasterOptimizer) -> None:
    """Checks that a step changes no bit while `hold` or `found_inf` is set."""
    for switch in ("hold", "found_inf"):
        before = everything(optimizer)
        setattr(optimizer, switch, torch.ones(()))
        optimizer.step()
        assert bits_equal(everything(optimizer), before)
        assert optimizer.overflow == 0
        setattr(optimizer, switch, torch.zeros(()))
        optimizer.step()
        assert not bits_equal(everything(optimizer), before)
