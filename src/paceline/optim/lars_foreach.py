"""A LARS step in torch's list operations, for CPUs, GPUs without Triton, and the `in_half` ablation.

Updates masters, momenta and parameters in place, or leaves them bit-identical. Does not synchronize
with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.optim.state import Gates, Hyper, Outcome, Row

# Elements per fp32 sum of squares. The largest relative error measured, with equal elements, is 5.4e-7
# for 512 and 1.0e-6 for 1,024; the time is the same.
_CHUNK = 512


def run(
    rows: Sequence[Row], hypers: Sequence[Hyper], gates: Gates, outcome: Outcome, in_half: bool
) -> None:
    """One step. All norms come first, because one non-finite gradient skips all updates."""
    gradients = unscaled(rows, gates.grad_scale)
    if in_half or any(hyper.adapt for hyper in hypers):
        norms = norms_of(gradients, in_half)
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
            weights = torch.stack(norms_of([row.master for row in members], in_half))
            ratios = trust_ratio(weights, torch.stack([norms[i] for i in positions]), hyper)
            put(outcome.ratios, members, ratios.float())
        pushes = _pushes(members, own, hyper, ratios)
        if go is None:
            _select(members, pushes, hyper, [allowed[i] for i in positions])
            continue
        chosen = [i for i, position in enumerate(positions) if go[position]]
        if chosen:
            _apply([members[i] for i in chosen], [pushes[i] for i in chosen], hyper)


def check_finite(
    rows: Sequence[Row], norms: Sequence[Tensor], gates: Gates, outcome: Outcome
) -> Tensor:
    """Sets the flags of `outcome` from the norms of the unscaled gradients. Returns which rows may be
    updated, on the device."""
    bad = ~torch.isfinite(torch.stack([norm.float() for norm in norms]).square())
    allowed = torch.ones_like(bad)
    if gates.active is not None:
        active = gates.active.unbind()
        allowed = torch.stack([active[row.index] for row in rows]) != 0
    outcome.clear()
    put(outcome.bad, rows, (bad & allowed).float())
    outcome.overflow.copy_(outcome.bad.amax())
    return allowed & gates.allow(outcome)


def on_host(device: torch.device) -> bool:
    """Whether flags can be read without a synchronization."""
    return device.type == "cpu"


def put(vector: Tensor, rows: Sequence[Row], values: Tensor) -> None:
    """vector[index] = value for each row. Indexing with a list would synchronize with the device."""
    entries = list(vector.unbind())
    for row, value in zip(rows, values.unbind(), strict=True):
        entries[row.index] = value
    vector.copy_(torch.stack(entries))


def trust_ratio(weight_norm: Tensor, gradient_norm: Tensor, hyper: Hyper) -> Tensor:
    """λ in the format of the norms; 1 where a squared norm is 0 or λ is not finite."""
    below = gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    ratio = hyper.trust_coefficient * weight_norm / below
    if hyper.clip:
        # With lr = 0 the ratio does not matter, and 0 / 0 would give NaN.
        ratio = torch.clamp(ratio / hyper.lr, max=1.0) if hyper.lr > 0 else torch.ones_like(ratio)
    usable = (weight_norm.square() > 0) & (gradient_norm.square() > 0) & torch.isfinite(ratio)
    return torch.where(usable, ratio, torch.ones_like(ratio))


def unscaled(rows: Sequence[Row], grad_scale: Tensor | None) -> list[Tensor]:
    """Gradients in the master's format, divided by the scale; does not change the gradients."""
    gradients = [row.gradient.to(row.master.dtype) for row in rows]
    if grad_scale is None:
        return gradients
    return list(torch._foreach_mul(gradients, grad_scale.reshape(()).float().reciprocal()))


def norms_of(tensors: Sequence[Tensor], in_half: bool = False) -> list[Tensor]:
    if in_half:  # squares and sums overflow the half format: the point of the ablation
        return [(tensor * tensor).sum().sqrt() for tensor in tensors]
    if not tensors or not on_host(tensors[0].device):
        return list(torch._foreach_norm(list(tensors), 2))
    return accurate_norms(tensors)


def accurate_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """2-norms of fp32 tensors on the CPU, with a relative error of at most 1e-6.

    torch's CPU norm sums all squares of a tensor in a few fp32 accumulators; its relative error grows
    with the size, to 3e-3 for 40 million normally distributed elements. Here fp32 sums cover one
    chunk each, and chunks are added in fp64.
    """
    norms: list[Tensor | None] = [None] * len(tensors)
    small = [i for i, tensor in enumerate(tensors) if tensor.numel() <= _CHUNK]
    if small:
        found = torch._foreach_norm([tensors[i] for i in small], 2)
        for i, norm in zip(small, found, strict=True):
            norms[i] = norm
    return [
        _chunked_norm(t) if norm is None else norm for t, norm in zip(tensors, norms, strict=True)
    ]


def _chunked_norm(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # in memory order: reshape does not copy
    flat = tensor.reshape(-1)
    even = flat.numel() // _CHUNK * _CHUNK
    parts = torch.linalg.vector_norm(flat[:even].view(-1, _CHUNK), dim=1)
    if even < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[even:]).reshape(1)])
    whole: Tensor = torch.linalg.vector_norm(parts, dtype=torch.float64)
    return whole.to(tensor.dtype)


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
