"""Triton kernels of AdamW and LAMB over many tensors at once, given tables of their addresses.

Chunks, tables and the pass over norms are those of `lars_kernels`. `flags` marks non-finite gradients;
`moments` updates both averages and, for AdamW, the weights; for LAMB `trust` computes λ of each tensor
from sums that `moments` leaves, and `apply` changes the weights. `advance` counts the step. A flag or
switch that forbids the step makes all of them leave everything as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.optim.lars_kernels import (
    ADAPT,
    ANYWHERE,
    BETA1,
    CLIP,
    COLUMNS,
    DECAY,
    EPS,
    FIRST_CHUNK,
    GRADIENT,
    GROUP,
    INDEX,
    KINDS,
    LR,
    MASTER,
    MOMENTUM,
    NUMEL,
    PARAMETER,
    _address,
    _any,
    _ordered_sum,
    norms,
)

__all__ = ["KINDS", "advance", "apply", "flags", "moments", "norms", "trust"]

# A row of the tensor table, and columns of the hyper-parameter table, as in `AdamHyper`.
SECOND = tl.constexpr(8)
BETA2 = tl.constexpr(3)
ADAM_EPS = tl.constexpr(5)
REST2 = tl.constexpr(6)


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE)
def flags(
    table, active, partials, bad, tensors, chunks, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """bad[p] = 1 where an active gradient is not finite; p counts parameters."""
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + chunks + tl.load(table + FIRST_CHUNK * tensors + tensor)
    finite = tl.abs(_ordered_sum(begin, count, WIDTH)) < float("inf")  # NaN compares false
    flagged = (tl.load(active + index) != 0) & (finite == 0)
    tl.store(bad + index, flagged.to(tl.float32))


@triton.jit
def _direction(m, v, w, correction1, root2, eps, decay):
    """m̂ / (√v̂ + eps) + βw, where `root2` is the root of v's correction."""
    return (m / correction1) / (tl.sqrt_rn(v) / root2 + eps) + decay * w


@triton.jit
def _load(base, offsets, left, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(base + offsets, mask=offsets < left, other=0.0).to(tl.float32)
    return tl.load(base + offsets).to(tl.float32)


@triton.jit
def _moments_block(
    gradient, master, first, second, parameter, offsets, left,
    inverse, lr, beta1, rest1, beta2, rest2, correction1, root2, eps, decay,
    HALF: tl.constexpr, ADAPTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Updates the averages, and without ADAPTS the weights. Returns the squares of the direction."""
    mask = offsets < left if MASKED else None
    g = _load(gradient, offsets, left, MASKED) * inverse
    w = _load(master, offsets, left, MASKED)
    m = beta1 * _load(first, offsets, left, MASKED) + rest1 * g
    v = beta2 * _load(second, offsets, left, MASKED) + rest2 * g * g
    tl.store(first + offsets, m, mask=mask)
    tl.store(second + offsets, v, mask=mask)
    direction = _direction(m, v, w, correction1, root2, eps, decay)
    if not ADAPTS:
        w = w - lr * direction
        tl.store(master + offsets, w, mask=mask)
        if HALF is not None:
            tl.store(parameter + offsets, w.to(HALF), mask=mask)
    if MASKED:
        direction = tl.where(offsets < left, direction, 0.0)
    return direction * direction


@triton.jit(
    do_not_specialize=["first", "tensors", "chunks", "parameters"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def moments(
    table, chunk_tensor, hyper, grad_scale, found_inf, hold, active, corrections, bad, overflow,
    partials, first, tensors, chunks, parameters,
    GRAD: tl.constexpr, HALF: tl.constexpr, ADAPTS: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g², on one chunk. Then the weights for AdamW, or the sum
    of squares of the direction for LAMB, in place of the gradient's."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    flagged = _any(bad, parameters, WIDTH)
    if tl.program_id(0) == 0:
        tl.store(overflow, flagged)
    go = (flagged == 0) & (tl.load(found_inf) == 0) & (tl.load(hold) == 0)
    if go & (tl.load(active + index) != 0):
        start = (chunk - tl.load(table + FIRST_CHUNK * tensors + tensor)) * CHUNK
        left = tl.minimum(tl.load(table + NUMEL * tensors + tensor) - start, CHUNK).to(tl.int32)
        row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
        lr, decay, eps = tl.load(row + LR), tl.load(row + DECAY), tl.load(row + ADAM_EPS)
        beta1, beta2, rest2 = tl.load(row + BETA1), tl.load(row + BETA2), tl.load(row + REST2)
        correction1 = tl.load(corrections + index)
        root2 = tl.sqrt_rn(tl.load(corrections + parameters + index))
        inverse = tl.div_rn(1.0, tl.load(grad_scale).to(tl.float32))
        gradient = _address(table, GRADIENT, tensor, tensors, GRAD, ALIGN) + start
        master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
        average = _address(table, MOMENTUM, tensor, tensors, tl.float32, ALIGN) + start
        second = _address(table, SECOND, tensor, tensors, tl.float32, ALIGN) + start
        parameter = master
        if HALF is not None:
            parameter = _address(table, PARAMETER, tensor, tensors, HALF, ALIGN) + start
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for block in range(0, CHUNK, BLOCK):
            if block + BLOCK <= left:
                total += _moments_block(
                    gradient, master, average, second, parameter, block + lanes, left,
                    inverse, lr, beta1, 1.0 - beta1, beta2, rest2, correction1, root2, eps, decay,
                    HALF, ADAPTS, False,
                )  # fmt: skip
            elif block < left:
                total += _moments_block(
                    gradient, master, average, second, parameter, block + lanes, left,
                    inverse, lr, beta1, 1.0 - beta1, beta2, rest2, correction1, root2, eps, decay,
                    HALF, ADAPTS, True,
                )  # fmt: skip
        if ADAPTS:
            tl.store(partials + chunks + chunk, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE)
def trust(
    table, hyper, found_inf, hold, active, overflow, partials, ratio, tensors, chunks,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ratio[p] = ‖w‖ / (‖u‖ + eps); 1 without adaptation, and where the step is skipped."""
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + tl.load(table + FIRST_CHUNK * tensors + tensor)
    weight_sum = _ordered_sum(begin, count, WIDTH)
    direction_sum = _ordered_sum(begin + chunks, count, WIDTH)
    value = tl.sqrt_rn(weight_sum) / (tl.sqrt_rn(direction_sum) + tl.load(row + EPS))
    value = tl.where(tl.load(row + CLIP) != 0, tl.minimum(value, 1.0), value)
    go = (tl.load(overflow) == 0) & (tl.load(found_inf) == 0) & (tl.load(hold) == 0)
    usable = (weight_sum > 0) & (direction_sum > 0) & (tl.abs(value) < float("inf"))
    usable = usable & (tl.load(row + ADAPT) != 0) & go & (tl.load(active + index) != 0)
    tl.store(ratio + index, tl.where(usable, value, 1.0))


@triton.jit
def _apply_block(
    master, first, second, parameter, offsets, left,
    rate, correction1, root2, eps, decay, HALF: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    mask = offsets < left if MASKED else None
    w = _load(master, offsets, left, MASKED)
    m, v = _load(first, offsets, left, MASKED), _load(second, offsets, left, MASKED)
    w = w - rate * _direction(m, v, w, correction1, root2, eps, decay)
    tl.store(master + offsets, w, mask=mask)
    if HALF is not None:
        tl.store(parameter + offsets, w.to(HALF), mask=mask)


@triton.jit(
    do_not_specialize=["first", "tensors", "parameters"], do_not_specialize_on_alignment=ANYWHERE
)
def apply(
    table, chunk_tensor, hyper, found_inf, hold, active, corrections, ratio, overflow,
    first, tensors, parameters,
    HALF: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w ← w − lr·λ·u on one chunk, where u is computed again from the averages."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    go = (tl.load(overflow) == 0) & (tl.load(found_inf) == 0) & (tl.load(hold) == 0)
    if go & (tl.load(active + index) != 0):
        start = (chunk - tl.load(table + FIRST_CHUNK * tensors + tensor)) * CHUNK
        left = tl.minimum(tl.load(table + NUMEL * tensors + tensor) - start, CHUNK).to(tl.int32)
        row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
        rate = tl.load(row + LR) * tl.load(ratio + index)
        decay, eps = tl.load(row + DECAY), tl.load(row + ADAM_EPS)
        correction1 = tl.load(corrections + index)
        root2 = tl.sqrt_rn(tl.load(corrections + parameters + index))
        master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
        average = _address(table, MOMENTUM, tensor, tensors, tl.float32, ALIGN) + start
        second = _address(table, SECOND, tensor, tensors, tl.float32, ALIGN) + start
        parameter = master
        if HALF is not None:
            parameter = _address(table, PARAMETER, tensor, tensors, HALF, ALIGN) + start
        lanes = tl.arange(0, BLOCK)
        for block in range(0, CHUNK, BLOCK):
            if block + BLOCK <= left:
                _apply_block(
                    master, average, second, parameter, block + lanes, left,
                    rate, correction1, root2, eps, decay, HALF, False,
                )  # fmt: skip
            elif block < left:
                _apply_block(
                    master, average, second, parameter, block + lanes, left,
                    rate, correction1, root2, eps, decay, HALF, True,
                )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=ANYWHERE)
def advance(table, found_inf, hold, active, overflow, steps, tensors):
    """steps[p] += 1 where the step was made."""
    index = tl.load(table + INDEX * tensors + tl.program_id(0))
    go = (tl.load(overflow) == 0) & (tl.load(found_inf) == 0) & (tl.load(hold) == 0)
    if go & (tl.load(active + index) != 0):
        tl.store(steps + index, tl.load(steps + index) + 1.0)
