"""AdamW (Loshchilov & Hutter 2019) and LAMB (You et al. 2020) in mixed precision.

Masters, kernels, device switches and checkpoints are those of all optimizers here. Each parameter
counts its own updates, on the device: a skipped step does not count, and neither does one that a
captured CUDA graph replays without a gradient for the parameter.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import RunError
from paceline.optim import adam_foreach
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
    check_hyper,
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
    ) -> None:
        values = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values, fused=fused)

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
        adam_foreach.run(rows, hypers, gates, outcome, self._steps, self._corrections)


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
    ) -> None:
        values = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "clip": clip, "trust_eps": trust_eps, "adapt": adapt,
        }  # fmt: skip
        MasterOptimizer.__init__(self, params, values, fused=fused, adapt_bias_norm=adapt_bias_norm)
