"""LARS, layer-wise adaptive rate scaling (You et al. 2017), and momentum SGD, in mixed precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import FusedStep, LarsStep
from paceline.optim.registry import Context
from paceline.optim.rule import Rows, UpdateRule, check_hyper, norms_of, read_hyper
from paceline.optim.rule_settings import LarsSettings
from paceline.optim.settings import OptimSettings
from paceline.optim.state import MOMENTUM


class Hyper(NamedTuple):
    """Hyper-parameters of one parameter group of LARS or SGD, in the order in which kernels read them."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    lr_in_momentum: bool
    clip: bool
    adapt: bool


class LarsRule(UpdateRule):
    """The update rule of LARS and, with `adapt=False`, of SGD; `LARS` and `SGD` have the equations."""

    Hyper: ClassVar[Any] = Hyper
    buffers = (MOMENTUM,)
    has_kernels = True

    def update(self, rows: Rows, hyper: Any) -> Tensor | None:
        weights, momenta, pushes = rows.masters, rows.buffers(MOMENTUM), rows.gradients
        # The rate multiplies what is added to the momentum (inside), or the momentum itself (outside).
        inside, outside = (hyper.lr, 1.0) if hyper.lr_in_momentum else (1.0, hyper.lr)
        ratios = _trust_ratios(weights, rows.norms, hyper) if hyper.adapt else None
        if hyper.weight_decay:
            pushes = list(torch._foreach_add(pushes, weights, alpha=hyper.weight_decay))
        if ratios is not None:
            pushes = list(torch._foreach_mul(pushes, list((ratios * inside).unbind())))
        elif inside != 1.0 or not hyper.weight_decay:  # a rule must not change the gradients
            pushes = list(torch._foreach_mul(pushes, inside))
        torch._foreach_mul_(momenta, hyper.momentum)
        torch._foreach_add_(momenta, pushes)
        if hyper.nesterov:
            torch._foreach_add_(pushes, momenta, alpha=hyper.momentum)
        torch._foreach_add_(weights, pushes if hyper.nesterov else momenta, alpha=-outside)
        return ratios

    def check(self, group: Mapping[str, Any]) -> None:
        check_hyper(read_hyper(Hyper, group))

    def reads_norms(self, hypers: Sequence[Any]) -> bool:
        return any(hyper.adapt for hyper in hypers)

    def kernels(self, optimizer: MasterOptimizer) -> FusedStep:
        return LarsStep()


def _trust_ratios(weights: Sequence[Tensor], norms: Sequence[Tensor], hyper: Hyper) -> Tensor:
    """Returns the trust ratio λ of each weight, as in `LARS`, from norms of weights and gradients.

    λ is 1 if a squared norm is 0 or if λ would not be finite.
    """
    weight_norm, gradient_norm = torch.stack(norms_of(weights)), torch.stack(list(norms))
    below = gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    ratio = hyper.trust_coefficient * weight_norm / below
    if hyper.clip:
        # With lr = 0 the ratio does not matter, and 0 / 0 would give NaN.
        ratio = torch.clamp(ratio / hyper.lr, max=1.0) if hyper.lr > 0 else torch.ones_like(ratio)
    usable = (weight_norm.square() > 0) & (gradient_norm.square() > 0) & torch.isfinite(ratio)
    return torch.where(usable, ratio, torch.ones_like(ratio))


class LARS(MasterOptimizer):
    """Layer-wise adaptive rate scaling.

    λ = η‖w‖ / (‖g‖ + β‖w‖ + eps); v ← m·v + lr·λ·(g + βw); w ← w − v

    λ is 1 if a norm is 0, and in groups with `adapt=False`. A group may override each hyper-parameter.
    `MasterOptimizer` describes `found_inf` and the other tensors that control a step.

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        momentum: Momentum m.
        weight_decay: Weight decay β.
        trust_coefficient: Trust coefficient η.
        eps: Added to the denominator of λ.
        nesterov: Use Nesterov momentum.
        lr_in_momentum: False for v ← m·v + λ(g + βw); w ← w − lr·v.
        clip: Use min(λ/lr, 1) instead of λ, so that the local rate never exceeds `lr` (LARC).
        adapt: False to use λ = 1.
        adapt_bias_norm: True to compute λ also for groups with the role `bias_norm`.
        fused: True for Triton kernels, False for torch's foreach operations. None chooses kernels on
            CUDA if Triton is installed, otherwise foreach operations.

    Example:
        >>> optimizer = LARS(parameter_groups(model, 5e-5), lr=11.0)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        lr_in_momentum: bool = True,
        clip: bool = False,
        adapt: bool = True,
        adapt_bias_norm: bool = False,
        fused: bool | None = None,
    ) -> None:
        hyper = Hyper(
            lr, momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum, clip, adapt
        )  # fmt: skip
        super().__init__(
            params, hyper._asdict(), LarsRule, fused=fused, adapt_bias_norm=adapt_bias_norm
        )


class SGD(MasterOptimizer):
    """Momentum SGD as in torch, with fp32 master weights.

    v ← m·v + (g + βw); w ← w − lr·v

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        momentum: Momentum m.
        weight_decay: Weight decay β.
        nesterov: Use Nesterov momentum.
        fused: The implementation, as in `LARS`.

    Example:
        >>> optimizer = SGD(parameter_groups(model, 5e-4), lr=0.1)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        fused: bool | None = None,
    ) -> None:
        hyper = Hyper(
            lr, momentum, weight_decay, trust_coefficient=0.001, eps=0.0, nesterov=nesterov,
            lr_in_momentum=False, clip=False, adapt=False,
        )  # fmt: skip
        super().__init__(params, hyper._asdict(), LarsRule, fused=fused, adapt_bias_norm=False)


def create_sgd(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> SGD:
    """Creates SGD from the settings; see `OptimizerSettings.CREATE`."""
    return SGD(groups, lr, settings.momentum, nesterov=settings.nesterov, fused=context.fused)


def create_lars(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> LARS:
    """Creates LARS from the settings; see `OptimizerSettings.CREATE`."""
    own = settings.of("lars", LarsSettings)
    return LARS(
        groups, lr, settings.momentum, nesterov=settings.nesterov, fused=context.fused,
        trust_coefficient=own.trust_coefficient, clip=own.clip,
    )  # fmt: skip
