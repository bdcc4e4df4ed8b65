"""AdamW (Loshchilov & Hutter 2019) and LAMB (You et al. 2020) in mixed precision.

Masters, kernels, device switches and checkpoints are those of all optimizers here. Each parameter
counts its own updates, on the device: a skipped step does not count, and neither does one that a
captured CUDA graph replays without a gradient for the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import RunError
from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import AdamStep
from paceline.optim.state import (
    STEP,
    AdamHyper,
    Gates,
    HyperTable,
    Outcome,
    Row,
    capturing,
    check_finite,
    check_hyper,
    norms_of,
    on_host,
    put,
    unscaled,
)

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"


class AdamW(MasterOptimizer):
    """m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − lr·(m̂ / (√v̂ + eps) + βw).

    m̂ = m / (1−β₁ᵗ) and v̂ = v / (1−β₂ᵗ), where t counts the parameter's updates; `weight_decay` is β.
    State dicts of `torch.optim.AdamW` can be loaded. `fused` and the switches on the device are those
    of `MasterOptimizer`.

    Example:
        optimizer = AdamW(parameter_groups(model, 0.05), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    BUFFERS: ClassVar[tuple[str, ...]] = (EXP_AVG, EXP_AVG_SQ)
    NUMBERS: ClassVar[tuple[str, ...]] = (STEP,)
    _adapts = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        fused: bool | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        values = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values, fused=fused, foreach=foreach, maximize=maximize)

    def _set_up(self) -> None:
        super()._set_up()
        self._steps = torch.zeros(0)
        self._corrections = torch.zeros(2, 0)
        self._logs: HyperTable | None = None
        self._captured: list[tuple[Tensor, ...]] = []  # kept for graphs that read them

    @torch.no_grad()
    def _ready(self) -> Outcome:
        if self._outcome is not None and self._ready_for == len(self.param_groups):
            return self._outcome
        outcome = super()._ready()
        parameters = self.parameters()
        if self._steps.numel() != len(parameters):
            self._steps = torch.zeros(len(parameters), device=outcome.bad.device)
            self._corrections = torch.ones(2, len(parameters), device=outcome.bad.device)
            self._logs = HyperTable(len(parameters), 2, outcome.bad.device)
        # One vector for the kernels; the state of each parameter is a view of its number.
        for number, p in zip(self._steps.unbind(), parameters, strict=True):
            counted = self.state[p].get(STEP)
            if counted is None or counted.data_ptr() != number.data_ptr():
                if counted is None:  # new, or a state without this parameter was loaded
                    number.zero_()
                else:
                    number.copy_(counted)
                self.state[p][STEP] = number
        if isinstance(self._engine, AdamStep):
            self._engine.steps, self._engine.corrections = self._steps, self._corrections
        return outcome

    def _hyper_of(self, group: dict[str, Any]) -> AdamHyper:
        return check_hyper(AdamHyper.of(group))

    def _create_engine(self) -> AdamStep:
        return AdamStep(adapts=self._adapts)

    def upload(self) -> None:
        super().upload()
        assert self._logs is not None
        rows = []
        for group in self.param_groups:
            # The logarithm keeps seven digits of 1 − βᵗ in fp32; β = 0.999 itself would leave four.
            logs = tuple(math.log(beta) if beta > 0 else -math.inf for beta in group["betas"])
            rows += [logs] * len(group["params"])
        self._logs.send(tuple(rows))

    def _transform(self, rows: list[Row], gates: Gates) -> list[Row]:
        """Computes 1 − βᵗ of the step to come, t being one more than the updates so far."""
        if self._logs is None:
            raise RunError("a step was captured without preparation", "call prepare() before")
        if capturing(self._steps.device):
            self._captured.append((self._steps, self._corrections, self._logs.values))
        powers = (self._steps.double() + 1) * self._logs.values.double().t()
        self._corrections.copy_(torch.expm1(powers).neg_())
        return rows

    def _run_foreach(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        hypers = [AdamHyper.of(group) for group in self.param_groups]
        _run(rows, hypers, gates, outcome, self._steps, self._corrections)


class LAMB(AdamW):
    """The direction u = m̂ / (√v̂ + eps) + βw of AdamW, and w ← w − lr·λ·u with λ = ‖w‖ / ‖u‖.

    λ is 1 where a norm is 0, in groups with `adapt=False`, and in groups of role `bias_norm` unless
    they or `adapt_bias_norm` say otherwise. `clip` makes λ at most 1; `trust_eps` is added to ‖u‖.

    Example:
        optimizer = LAMB(parameter_groups(model, 0.02), lr=5e-3)
    """

    _adapts = True

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
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        values = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "clip": clip, "trust_eps": trust_eps, "adapt": adapt,
        }  # fmt: skip
        MasterOptimizer.__init__(
            self, params, values, fused=fused, adapt_bias_norm=adapt_bias_norm, foreach=foreach,
            maximize=maximize,
        )  # fmt: skip


def _run(
    rows: Sequence[Row],
    hypers: Sequence[AdamHyper],
    gates: Gates,
    outcome: Outcome,
    steps: Tensor,
    corrections: Tensor,
) -> None:
    """A step in torch's list operations: changes masters, averages, parameters and step counts in place,
    or leaves them bit-identical. `corrections` are 1 − β₁ᵗ and 1 − β₂ᵗ of each parameter."""
    gradients = unscaled(rows, gates.grad_scale)
    allowed = check_finite(rows, list(torch._foreach_norm(gradients, 2)), gates, outcome)
    go = allowed.tolist() if on_host(allowed.device) else None
    first, roots = corrections[0].unbind(), corrections[1].sqrt().unbind()
    buckets: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, row in enumerate(rows):
        if go is None or go[position]:
            buckets.setdefault((row.group, row.parameter.dtype), []).append(position)
    for (group, _), positions in buckets.items():
        members, hyper = [rows[i] for i in positions], hypers[group]
        own = [gradients[i] for i in positions]
        seconds = [row.second for row in members if row.second is not None]
        averages = list(torch._foreach_mul([row.momentum for row in members], hyper.beta1))
        torch._foreach_add_(averages, own, alpha=1 - hyper.beta1)
        squares = list(torch._foreach_mul(seconds, hyper.beta2))
        torch._foreach_addcmul_(squares, own, own, value=1 - hyper.beta2)
        below = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(below, [roots[row.index] for row in members])
        torch._foreach_add_(below, hyper.adam_eps)
        pushes = list(torch._foreach_div(averages, [first[row.index] for row in members]))
        torch._foreach_div_(pushes, below)
        masters = [row.master for row in members]
        if hyper.weight_decay:
            torch._foreach_add_(pushes, masters, alpha=hyper.weight_decay)
        if hyper.adapt:
            ratios = _trust_ratio(norms_of(masters), norms_of(pushes), hyper)
            put(outcome.ratios, members, torch.where(_at(allowed, positions), ratios, 1.0))
            torch._foreach_mul_(pushes, list(ratios.unbind()))
        weights = torch._foreach_add(masters, pushes, alpha=-hyper.lr)
        flags = None if go is not None else [allowed[i] for i in positions]
        _commit(masters, weights, flags)
        _commit([row.momentum for row in members], averages, flags)
        _commit(seconds, squares, flags)
        if members[0].parameter.dtype != masters[0].dtype:
            halves = [row.parameter for row in members]
            _commit(halves, [master.to(halves[0].dtype) for master in masters], flags)
    done = torch.zeros_like(steps)
    put(done, rows, allowed.to(steps.dtype))
    steps.add_(done)


def _at(flags: Tensor, positions: Sequence[int]) -> Tensor:
    """Without an index tensor, whose copy to the device would synchronize."""
    return torch.stack([flags[i] for i in positions])


def _trust_ratio(weights: Sequence[Tensor], pushes: Sequence[Tensor], hyper: AdamHyper) -> Tensor:
    """‖w‖ / (‖u‖ + eps) from norms; 1 where a squared norm is 0."""
    weight, push = torch.stack(list(weights)), torch.stack(list(pushes))
    ratio = weight / (push + hyper.eps)
    if hyper.clip:
        ratio = ratio.clamp(max=1.0)
    usable = (weight.square() > 0) & (push.square() > 0) & torch.isfinite(ratio)
    return torch.where(usable, ratio, torch.ones_like(ratio))


def _commit(old: Sequence[Tensor], new: Sequence[Tensor], flags: Sequence[Tensor] | None) -> None:
    """Copies, or selects on the device. A product with 0 would let NaN through."""
    if flags is None:
        torch._foreach_copy_(list(old), list(new))
        return
    for target, value, flag in zip(old, new, flags, strict=True):
        torch.where(flag, value, target, out=target)
