"""LARS, layer-wise adaptive rate scaling (You et al. 2017), momentum SGD, and SGD that begins as RMSprop
(Akiba et al. 2017), in mixed precision.

In `RMSpropWarmup` the share of SGD comes from the schedule (`LrSchedule.others`). It has no kernels: on a
GPU the update runs in torch's list operations, without host synchronization and outside of the CUDA
graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import FusedStep, LarsStep
from paceline.optim.state import (
    MOMENTUM,
    Gates,
    Hyper,
    Outcome,
    Row,
    check_finite,
    check_hyper,
    norms_of,
    on_host,
    put,
    read_hyper,
    unscaled,
)


class LARS(MasterOptimizer):
    """λ = η‖w‖ / (‖g‖ + β‖w‖ + eps); v ← m·v + lr·λ·(g + βw); w ← w − v.

    `trust_coefficient` is η, `weight_decay` β. λ is 1 where a norm is 0 and in groups with
    `adapt=False`. `lr_in_momentum=False` keeps the rate out of v: v ← m·v + λ(g + βw); w ← w − lr·v.
    `clip` makes λ min(λ/lr, 1), so that the local rate never exceeds lr. Groups may override each of
    these. Groups of role `bias_norm` are not adapted unless they or `adapt_bias_norm` say so. `fused`
    and the switches on the device are those of `MasterOptimizer`.

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
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = Hyper(
            lr, momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum, clip, adapt
        )._asdict()  # fmt: skip
        super().__init__(
            params, defaults, fused=fused, adapt_bias_norm=adapt_bias_norm,
            foreach=foreach, maximize=maximize,
        )  # fmt: skip

    def _hyper_of(self, group: dict[str, Any]) -> Hyper:
        return check_hyper(read_hyper(Hyper, group))

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        # Not checked: a schedule may lower the momentum of a Nesterov group to 0.
        return read_hyper(Hyper, group)

    def _create_engine(self) -> FusedStep:
        return LarsStep()

    def _run_foreach(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        hypers = [self._hyper(group) for group in self.param_groups]
        _run(rows, hypers, gates, outcome)


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
        foreach: bool | None = None,
        maximize: bool = False,
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
            foreach=foreach,
            maximize=maximize,
        )


def _run(rows: Sequence[Row], hypers: Sequence[Hyper], gates: Gates, outcome: Outcome) -> None:
    """A step in torch's list operations: changes masters, momenta and parameters in place, or leaves them
    bit-identical. All norms come first, because one non-finite gradient skips all updates."""
    gradients = unscaled(rows, gates.grad_scale)
    if any(hyper.adapt for hyper in hypers):
        norms = norms_of(gradients)
    else:  # used by the finite check only, which needs no accuracy
        norms = list(torch._foreach_norm(gradients, 2))
    allowed = check_finite(rows, norms, gates, outcome)
    go = allowed.tolist() if on_host(allowed.device) else None
    buckets: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, row in enumerate(rows):
        buckets.setdefault((row.group, row.parameter.dtype), []).append(position)
    for (group, _), positions in buckets.items():
        members = [rows[i] for i in positions]
        own = [gradients[i] for i in positions]
        hyper = hypers[group]
        ratios: Tensor | None = None
        if hyper.adapt:
            weights = torch.stack(norms_of([row.master for row in members]))
            ratios = _trust_ratio(weights, torch.stack([norms[i] for i in positions]), hyper)
            put(outcome.ratios, members, ratios.float())
        pushes = _pushes(members, own, hyper, ratios)
        if go is None:
            _select(members, pushes, hyper, [allowed[i] for i in positions])
            continue
        chosen = [i for i, position in enumerate(positions) if go[position]]
        if chosen:
            _apply([members[i] for i in chosen], [pushes[i] for i in chosen], hyper)


def _trust_ratio(weight_norm: Tensor, gradient_norm: Tensor, hyper: Hyper) -> Tensor:
    """λ in the format of the norms; 1 where a squared norm is 0 or λ is not finite."""
    below = gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    ratio = hyper.trust_coefficient * weight_norm / below
    if hyper.clip:
        # With lr = 0 the ratio does not matter, and 0 / 0 would give NaN.
        ratio = torch.clamp(ratio / hyper.lr, max=1.0) if hyper.lr > 0 else torch.ones_like(ratio)
    usable = (weight_norm.square() > 0) & (gradient_norm.square() > 0) & torch.isfinite(ratio)
    return torch.where(usable, ratio, torch.ones_like(ratio))


def _pushes(
    rows: Sequence[Row], gradients: list[Tensor], hyper: Hyper, ratios: Tensor | None
) -> list[Tensor]:
    """λ·(g + βw), times lr with `lr_in_momentum`: what is added to the momentum."""
    if hyper.weight_decay:
        masters = [row.master for row in rows]
        gradients = list(torch._foreach_add(gradients, masters, alpha=hyper.weight_decay))
    inside = hyper.lr if hyper.lr_in_momentum else 1.0
    if ratios is None and inside == 1.0 and hyper.weight_decay:
        return gradients  # fresh tensors; without decay they may be the caller's
    if ratios is None:
        return list(torch._foreach_mul(gradients, inside))
    return list(torch._foreach_mul(gradients, list((ratios * inside).unbind())))


def _apply(rows: Sequence[Row], pushes: list[Tensor], hyper: Hyper) -> None:
    """v ← m·v + push; w ← w − v, in place."""
    masters, momenta = [row.master for row in rows], [row.momentum for row in rows]
    torch._foreach_mul_(momenta, hyper.momentum)
    torch._foreach_add_(momenta, pushes)
    if hyper.nesterov:
        torch._foreach_add_(pushes, momenta, alpha=hyper.momentum)
    outside = 1.0 if hyper.lr_in_momentum else hyper.lr
    torch._foreach_add_(masters, pushes if hyper.nesterov else momenta, alpha=-outside)
    for row in rows:
        if row.master is not row.parameter:
            row.parameter.copy_(row.master)


def _select(
    rows: Sequence[Row], pushes: list[Tensor], hyper: Hyper, allowed: Sequence[Tensor]
) -> None:
    """`_apply` on copies, then a selection on the device. A product with 0 would let NaN through."""
    copies = []
    for row in rows:
        master, momentum = row.master.clone(), row.momentum.clone()
        parameter = master if row.master is row.parameter else row.parameter.clone()
        copies.append(Row(row.index, row.group, parameter, row.gradient, master, momentum))
    _apply(copies, pushes, hyper)
    for old, new, go in zip(rows, copies, allowed, strict=True):
        torch.where(go, new.momentum, old.momentum, out=old.momentum)
        torch.where(go, new.master, old.master, out=old.master)
        if old.master is not old.parameter:
            torch.where(go, new.parameter, old.parameter, out=old.parameter)


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
