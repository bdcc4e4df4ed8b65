"""AdamW (Loshchilov & Hutter 2019) and LAMB (You et al. 2020) in mixed precision.

The device counts the updates of each parameter, without skipped updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import AdamStep
from paceline.optim.registry import Context
from paceline.optim.rule import (
    Gates,
    HyperTable,
    Outcome,
    Row,
    Rows,
    UpdateRule,
    capturing,
    norms_of,
    put,
    unprepared,
)
from paceline.optim.rule_settings import AdamwSettings, LambSettings
from paceline.optim.settings import OptimSettings
from paceline.optim.state import EXP_AVG, EXP_AVG_SQ, STEP


class AdamHyper(NamedTuple):
    """Hyperparameters of one parameter group of AdamW or LAMB, in the order in which kernels read them.

    Fields that `lars.Hyper` has too, such as the trust ratio's `eps`, have the same position in both,
    because the kernels share code.
    """

    lr: float
    beta1: float
    weight_decay: float
    beta2: float
    eps: float
    adam_eps: float
    # 1 − β₂, computed in fp64: in fp32, 1 − 0.999 would lose three digits.
    rest2: float
    clip: bool
    adapt: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamHyper:
        """Reads the hyperparameters of a parameter group of AdamW or LAMB."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return cls(
            float(group["lr"]), beta1, float(group["weight_decay"]), beta2,
            float(group.get("trust_eps", 0.0)), float(group["eps"]), 1 - beta2,
            bool(group.get("clip", False)), bool(group.get("adapt", False)),
        )  # fmt: skip


class AdamRule(UpdateRule):
    """The update rule of AdamW and LAMB: w ← w − lr·λ·u, with u and λ as in `LAMB`.

    λ is 1 in groups without `adapt`, and therefore in all groups of AdamW.

    Attributes:
        adapts: True for LAMB.
        steps: Number of updates of each parameter; a tensor on the device.
        corrections: 1 − β₁ᵗ and 1 − β₂ᵗ of each parameter for the next step, of shape (2, parameters).
    """

    Hyper: ClassVar[Any] = AdamHyper
    buffers = (EXP_AVG, EXP_AVG_SQ)
    numbers = (STEP,)
    has_kernels = True

    def __init__(self, adapts: bool = False) -> None:
        self.adapts = adapts
        self.steps = torch.zeros(0)
        self.corrections = torch.zeros(2, 0)
        self._logs: HyperTable | None = None
        self._captured: list[tuple[Tensor, ...]] = []  # kept alive for captured graphs

    def update(self, rows: Rows, hyper: Any) -> Tensor | None:
        weights, gradients = rows.masters, rows.gradients
        averages, squares = rows.buffers(EXP_AVG), rows.buffers(EXP_AVG_SQ)
        first, second = self.corrections[0].unbind(), self.corrections[1].sqrt().unbind()
        torch._foreach_mul_(averages, hyper.beta1)
        torch._foreach_add_(averages, gradients, alpha=1 - hyper.beta1)
        torch._foreach_mul_(squares, hyper.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - hyper.beta2)
        below = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(below, [second[row.index] for row in rows.rows])
        torch._foreach_add_(below, hyper.adam_eps)
        pushes = list(torch._foreach_div(averages, [first[row.index] for row in rows.rows]))
        torch._foreach_div_(pushes, below)
        if hyper.weight_decay:
            torch._foreach_add_(pushes, weights, alpha=hyper.weight_decay)
        ratios = None
        if hyper.adapt:
            ratios = _trust_ratios(norms_of(weights), norms_of(pushes), hyper)
            torch._foreach_mul_(pushes, list(ratios.unbind()))
        torch._foreach_add_(weights, pushes, alpha=-hyper.lr)
        return ratios

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper.of(group)

    def kernels(self, optimizer: MasterOptimizer) -> AdamStep:
        return AdamStep(adapts=self.adapts)

    def ready(self, optimizer: MasterOptimizer) -> None:
        parameters, device = optimizer.parameters(), optimizer.overflow.device
        if self.steps.numel() != len(parameters):
            self.steps = torch.zeros(len(parameters), device=device)
            self.corrections = torch.ones(2, len(parameters), device=device)
            self._logs = HyperTable(len(parameters), 2, device)
        # One vector for the kernels; the state of each parameter is a view of its element.
        for number, p in zip(self.steps.unbind(), parameters, strict=True):
            counted = optimizer.state[p].get(STEP)
            if counted is None or counted.data_ptr() != number.data_ptr():
                if counted is None:  # new, or a state without this parameter was loaded
                    number.zero_()
                else:
                    number.copy_(counted)
                optimizer.state[p][STEP] = number
        if isinstance(optimizer.engine, AdamStep):
            optimizer.engine.steps, optimizer.engine.corrections = self.steps, self.corrections

    def upload(self, optimizer: MasterOptimizer) -> None:
        assert self._logs is not None
        rows = []
        for group in optimizer.param_groups:
            # The logarithm keeps seven digits of 1 − βᵗ in fp32; β = 0.999 itself would leave four.
            logs = tuple(math.log(beta) if beta > 0 else -math.inf for beta in group["betas"])
            rows += [logs] * len(group["params"])
        self._logs.send(tuple(rows))

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """Computes 1 − βᵗ for the next step, where t is the number of earlier updates plus one."""
        if self._logs is None:
            raise unprepared()
        if capturing(self.steps.device):
            self._captured.append((self.steps, self.corrections, self._logs.values))
        powers = (self.steps.double() + 1) * self._logs.values.double().t()
        self.corrections.copy_(torch.expm1(powers).neg_())
        return rows

    def finish(
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        """Adds 1 to the number of updates of all updated parameters, unless kernels have done so."""
        if optimizer.engine is None:
            done = torch.zeros_like(self.steps)
            put(done, rows, gates.allowed(rows, outcome).to(self.steps.dtype))
            self.steps.add_(done)


def _trust_ratios(weights: Sequence[Tensor], pushes: Sequence[Tensor], hyper: AdamHyper) -> Tensor:
    """Returns each weight's trust ratio ‖w‖ / (‖u‖ + eps), from norms of weights and directions u.

    The ratio is 1 if a squared norm is 0 or if it would not be finite.
    """
    weight, push = torch.stack(list(weights)), torch.stack(list(pushes))
    ratio = weight / (push + hyper.eps)
    if hyper.clip:
        ratio = ratio.clamp(max=1.0)
    usable = (weight.square() > 0) & (push.square() > 0) & torch.isfinite(ratio)
    return torch.where(usable, ratio, torch.ones_like(ratio))


class AdamW(MasterOptimizer):
    """Adam with decoupled weight decay.

    m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − lr·(m̂ / (√v̂ + eps) + βw)

    m̂ = m / (1−β₁ᵗ) and v̂ = v / (1−β₂ᵗ), where t counts the parameter's updates. State dicts of
    `torch.optim.AdamW` can be loaded. `MasterOptimizer` describes `found_inf` and the other tensors
    that control a step.

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        betas: β₁ and β₂.
        eps: Added to √v̂.
        weight_decay: Weight decay β.
        fused: True for Triton kernels, False for torch's foreach operations. None chooses kernels on
            CUDA if Triton is installed, otherwise foreach operations.

    Example:
        >>> optimizer = AdamW(parameter_groups(model, 0.05), lr=1e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        fused: bool | None = None,
    ) -> None:
        values = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values, AdamRule, fused=fused)


class LAMB(MasterOptimizer):
    """AdamW with a trust ratio per parameter tensor.

    u = m̂ / (√v̂ + eps) + βw, as in AdamW; λ = ‖w‖ / (‖u‖ + trust_eps); w ← w − lr·λ·u

    λ is 1 if a norm is 0, and in groups with `adapt=False`.

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        betas: β₁ and β₂.
        eps: Added to √v̂.
        weight_decay: Weight decay β.
        clip: Limit the trust ratio λ to 1.
        trust_eps: Added to ‖u‖ in λ.
        adapt: False to use λ = 1.
        adapt_bias_norm: True to compute λ also for groups with the role `bias_norm`.
        fused: The implementation, as in `AdamW`.

    Example:
        >>> optimizer = LAMB(parameter_groups(model, 0.02), lr=5e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        clip: bool = False,
        trust_eps: float = 0.0,
        adapt: bool = True,
        adapt_bias_norm: bool = False,
        fused: bool | None = None,
    ) -> None:
        values = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "clip": clip, "trust_eps": trust_eps, "adapt": adapt,
        }  # fmt: skip
        rule = partial(AdamRule, adapts=True)
        super().__init__(params, values, rule, fused=fused, adapt_bias_norm=adapt_bias_norm)


def create_adamw(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> AdamW:
    """Creates AdamW from the settings; see `OptimizerSettings.CREATE`."""
    own = settings.of("adamw", AdamwSettings)
    return AdamW(groups, lr, (own.beta1, own.beta2), own.eps, fused=context.fused)


def create_lamb(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> LAMB:
    """Creates LAMB from the settings; see `OptimizerSettings.CREATE`."""
    own = settings.of("lamb", LambSettings)
    betas = (own.beta1, own.beta2)
    return LAMB(groups, lr, betas, own.eps, clip=own.clip, fused=context.fused)
