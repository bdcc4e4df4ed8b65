"""SGD that begins as RMSprop (Akiba et al. 2017), in mixed precision.

`RmspropWarmupSettings.values` schedules the weight of SGD. There are no kernels: on a GPU the update runs
in torch's list operations, without host synchronization and outside of the CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.registry import Context
from paceline.optim.rule import Rows, UpdateRule
from paceline.optim.settings import OptimSettings
from paceline.optim.state import MOMENTUM

SQUARES = "square_avg"


class RmsHyper(NamedTuple):
    """Hyper-parameters of one parameter group."""

    lr: float
    momentum: float
    weight_decay: float
    beta2: float
    eps: float
    rms_rate: float
    sgd_share: float


class RmsWarmupRule(UpdateRule):
    """The update rule of `RMSpropWarmup`, whose docstring has the equations."""

    Hyper: ClassVar[Any] = RmsHyper
    buffers = (MOMENTUM, SQUARES)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not 0 <= group["sgd_share"] <= 1:
            raise ValueError(f"sgd_share = {group['sgd_share']}: must be in [0, 1]")

    def update(self, rows: Rows, hyper: Any) -> None:
        momenta, squares = rows.buffers(MOMENTUM), rows.buffers(SQUARES)
        for gradient, w, v, s in zip(rows.gradients, rows.masters, momenta, squares, strict=True):
            g = gradient.add(w, alpha=hyper.weight_decay)
            s.copy_(torch.lerp(g * g, s, hyper.beta2))
            push = g * hyper.sgd_share
            if hyper.sgd_share < 1 and hyper.lr > 0:
                rms = (1 - hyper.sgd_share) * hyper.rms_rate / hyper.lr
                push.addcdiv_(g, s.sqrt().add_(hyper.eps), value=rms)
            v.mul_(hyper.momentum).add_(push)
            w.sub_(hyper.lr * v)


class RMSpropWarmup(MasterOptimizer):
    """Interpolates between RMSprop with momentum and momentum SGD.

    s ← β₂s + (1−β₂)g²; v ← m·v + (a + (1−a)·η / (lr·(√s + eps)))·g; w ← w − lr·v

    g is the gradient plus the weight decay. `MasterOptimizer` describes `found_inf` and other tensors
    that control a step.

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        momentum: Momentum m.
        weight_decay: Weight decay.
        beta2: Decay rate β₂ of the average s.
        eps: Added to √s.
        rms_rate: Learning rate η of RMSprop.
        sgd_share: Weight a of SGD; 0 gives RMSprop, 1 gives SGD.

    Example:
        >>> optimizer = RMSpropWarmup(parameter_groups(model, 1e-4), lr=12.8)
        >>> set_rate(optimizer, 6.4, {"sgd_share": 0.01})
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        beta2: float = 0.99,
        eps: float = 1e-8,
        rms_rate: float = 3e-4,
        sgd_share: float = 1.0,
    ) -> None:
        defaults = RmsHyper(lr, momentum, weight_decay, beta2, eps, rms_rate, sgd_share)._asdict()
        super().__init__(params, defaults, RmsWarmupRule)

    def describe(self) -> str:
        """Returns the names of the method and its implementation, for display."""
        return "SGD with RMSprop warm-up, foreach"


def create(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> RMSpropWarmup:
    """Creates `RMSpropWarmup` from the settings; see `OptimizerSettings.CREATE`."""
    return RMSpropWarmup(groups, lr, settings.momentum)
