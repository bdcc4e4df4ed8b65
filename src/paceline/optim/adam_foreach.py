"""A step of AdamW or LAMB in torch's list operations, for CPUs and for GPUs without Triton.

Updates masters, averages, parameters and step counts in place, or leaves them bit-identical. Does not
synchronize with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.optim import lars_foreach
from paceline.optim.lars_foreach import check_finite, norms_of, put, unscaled
from paceline.optim.state import AdamHyper, Gates, Outcome, Row


def run(
    rows: Sequence[Row],
    hypers: Sequence[AdamHyper],
    gates: Gates,
    outcome: Outcome,
    steps: Tensor,
    corrections: Tensor,
) -> None:
    """One step. `corrections` are 1 − β₁ᵗ and 1 − β₂ᵗ of each parameter."""
    gradients = unscaled(rows, gates.grad_scale)
    allowed = check_finite(rows, list(torch._foreach_norm(gradients, 2)), gates, outcome)
    go = allowed.tolist() if lars_foreach.on_host(allowed.device) else None
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
            ratios = trust_ratio(norms_of(masters), norms_of(pushes), hyper)
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


def trust_ratio(weights: Sequence[Tensor], pushes: Sequence[Tensor], hyper: AdamHyper) -> Tensor:
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
