"""LARS, layer-wise adaptive rate scaling (You et al. 2017), and momentum SGD, in mixed precision."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim.optimizer import ParamsT

from paceline.optim import lars_foreach
from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import FusedStep, LarsStep
from paceline.optim.state import MOMENTUM, Gates, Hyper, Outcome, Row, check_hyper, read_hyper


class LARS(MasterOptimizer):
    """λ = η‖w‖ / (‖g‖ + β‖w‖ + eps); v ← m·v + lr·λ·(g + βw); w ← w − v.

    `trust_coefficient` is η, `weight_decay` β. λ is 1 where a norm is 0 and in groups with
    `adapt=False`. `lr_in_momentum=False` keeps the rate out of v: v ← m·v + λ(g + βw); w ← w − lr·v.
    `clip` makes λ min(λ/lr, 1), so that the local rate never exceeds lr. Groups may override each of
    these. Groups of role `bias_norm` are not adapted unless they or `adapt_bias_norm` say so. `in_half`
    is an ablation: no masters, all arithmetic in the parameter's own format. `fused` and the switches
    on the device are those of `MasterOptimizer`.

    Example:
        optimizer = LARS(parameter_groups(model, 5e-5), lr=11.0)
        loss.backward()
        optimizer.step()
    """

    BUFFERS: ClassVar[tuple[str, ...]] = (MOMENTUM,)

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
        in_half: bool = False,
    ) -> None:
        defaults = Hyper(
            lr, momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum, clip, adapt
        )._asdict()  # fmt: skip
        super().__init__(
            params, defaults, fused=fused, in_half=in_half, adapt_bias_norm=adapt_bias_norm
        )

    def _hyper_of(self, group: dict[str, Any]) -> Hyper:
        return check_hyper(read_hyper(Hyper, group))

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        # Not checked: a schedule may lower the momentum of a Nesterov group to 0.
        return read_hyper(Hyper, group)

    def _create_engine(self) -> FusedStep:
        return LarsStep()

    def _run_foreach(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        hypers = [self._hyper(group) for group in self.param_groups]
        lars_foreach.run(rows, hypers, gates, outcome, self.in_half)


class SGD(LARS):
    """v ← m·v + (g + βw); w ← w − lr·v: torch's rule, with the masters and device switches of LARS."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        fused: bool | None = None,
        in_half: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            weight_decay,
            nesterov=nesterov,
            lr_in_momentum=False,
            adapt=False,
            fused=fused,
            in_half=in_half,
        )
