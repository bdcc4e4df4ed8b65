"""LARS in float64, one parameter at a time, written from the equation; what the tests compare with.

In: numbers as Python and torch.float64 hold them. Out: `Reference`, stepped beside an optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("lr_in_momentum", "nesterov", "clip", "adapt", "weight_decay", "eps")
OPTIONS = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(
        (True, False), (True, False), (True, False), (True, False), (0.0, 0.1), (0.0, 0.5)
    )
]
# λ is about 0.3 in the tests below: these rates lie on both sides of it, so that `clip` bites sometimes.
RATES = (0.9, 0.1, 0.4)
ETA = 0.3


def option_id(options: dict[str, Any]) -> str:
    return ",".join(name if value is True else f"{name}={value}" for name, value in options.items())


class Reference:
    """One parameter: weight, momentum and the last ratio, in float64."""

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


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Within fp32 rounding of the largest value; elements near 0 come from cancellation."""
    error = float((found.detach().double().cpu() - expected.cpu()).abs().max())
    assert error <= tolerance * max(float(expected.abs().max()), 1e-30), error


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and all state, to be compared bit by bit."""
    held = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [p, *optimizer.state[p].values()]
            held += [tensor.detach().clone() for tensor in tensors]
    return held


def bits_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Equal to the bit, signs of zero included."""
    ints = {2: torch.int16, 4: torch.int32}
    return len(left) == len(right) and all(
        torch.equal(a.view(ints[a.element_size()]), b.view(ints[b.element_size()]))
        for a, b in zip(left, right, strict=True)
    )
