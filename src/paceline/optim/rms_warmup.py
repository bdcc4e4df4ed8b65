"""Momentum SGD that begins as RMSprop (Akiba et al. 2017), in mixed precision.

The share of SGD comes from the schedule (`LrSchedule.others`); masters, device switches and checkpoints
are those of all optimizers here. There are no kernels: on a GPU the update runs in torch's list
operations, without host synchronization and outside of the CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.foreach import check_finite, unscaled
from paceline.optim.state import MOMENTUM, Gates, Outcome, Row, check_hyper, read_hyper

SQUARES = "square_avg"
SGD_SHARE = "sgd_share"


class RmsHyper(NamedTuple):
    """Hyper-parameters of one group."""

    lr: float
    momentum: float
    weight_decay: float
    beta2: float
    eps: float
    rms_rate: float
    sgd_share: float


class RMSpropWarmup(MasterOptimizer):
    """s ← β₂s + (1−β₂)g²; v ← m·v + (a + (1−a)·η / (lr·(√s + eps)))·g; w ← w − lr·v.

    a is `sgd_share`: 0 is RMSprop with momentum and rate η (`rms_rate`), 1 is momentum SGD. g contains
    the weight decay. The switches on the device are those of `MasterOptimizer`.

    Example:
        optimizer = RMSpropWarmup(parameter_groups(model, 1e-4), lr=12.8)
        set_rate(optimizer, 6.4, {"sgd_share": 0.01})
    """

    BUFFERS: ClassVar[tuple[str, ...]] = (MOMENTUM, SQUARES)

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
        super().__init__(params, defaults, fused=False)

    def describe(self) -> str:
        return "SGD with RMSprop warm-up, foreach"

    def _hyper_of(self, group: dict[str, Any]) -> RmsHyper:
        return check_hyper(read_hyper(RmsHyper, group))

    def _run_foreach(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        gradients = unscaled(rows, gates.grad_scale)
        norms = list(torch._foreach_norm(gradients, 2))
        allowed = check_finite(rows, norms, gates, outcome)
        for row, gradient, go in zip(rows, gradients, allowed.unbind(), strict=True):
            hyper = self._hyper_of(self.param_groups[row.group])
            self._update(row, gradient, hyper, go)

    @staticmethod
    def _update(row: Row, gradient: torch.Tensor, hyper: RmsHyper, go: torch.Tensor) -> None:
        """A selection on the device: a product with 0 would let NaN through."""
        squares = row.second
        assert squares is not None
        g = gradient.add(row.master, alpha=hyper.weight_decay)
        new_squares = torch.lerp(g * g, squares, hyper.beta2)
        factor = hyper.sgd_share
        push = g * factor
        if factor < 1 and hyper.lr > 0:
            rms = (1 - factor) * hyper.rms_rate / hyper.lr
            push.addcdiv_(g, new_squares.sqrt().add_(hyper.eps), value=rms)
        momentum = row.momentum * hyper.momentum + push
        master = row.master - hyper.lr * momentum
        pairs = [(squares, new_squares), (row.momentum, momentum), (row.master, master)]
        if row.master is not row.parameter:
            pairs.append((row.parameter, master.to(row.parameter.dtype)))
        for old, new in pairs:
            torch.where(go, new, old, out=old)


def sgd_share(epoch: float, center: float, width: float) -> float:
    """½·exp(2(e − c)/w) before epoch c, then ½ + (e − c)/w, and 1 from c + w/2 on."""
    if epoch < center:
        return 0.5 * math.exp(2 * (epoch - center) / width)
    return min(0.5 + (epoch - center) / width, 1.0)
