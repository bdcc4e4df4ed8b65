"""Triton kernels of LARS over many tensors at once, given tables of their addresses.

A chunk is at most CHUNK elements of one tensor and is processed by one program. Three passes: `norms`
computes Σw² and Σg² of each chunk; `ratios` sums them by tensor in a fixed order, without atomics and
therefore bit-reproducibly, into λ and a non-finite flag; `update` writes masters, momenta and
parameters unless a flag or switch forbids it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Switches may be views at any address; recompiling for one would break a graph capture.
ANYWHERE = ["grad_scale", "found_inf", "hold", "active"]

# Rows of the tensor table.
GRADIENT = tl.constexpr(0)
MASTER = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
PARAMETER = tl.constexpr(3)
NUMEL = tl.constexpr(4)
FIRST_CHUNK = tl.constexpr(5)
GROUP = tl.constexpr(6)
INDEX = tl.constexpr(7)

# Columns of the hyper-parameter table, as in `Hyper`.
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
DECAY = tl.constexpr(2)
TRUST = tl.constexpr(3)
EPS = tl.constexpr(4)
NESTEROV = tl.constexpr(5)
INSIDE = tl.constexpr(6)
CLIP = tl.constexpr(7)
ADAPT = tl.constexpr(8)
COLUMNS = tl.constexpr(9)


@triton.jit
def _address(table, row: tl.constexpr, tensor, tensors, KIND: tl.constexpr, ALIGN: tl.constexpr):
    raw = tl.load(table + row * tensors + tensor)
    return tl.multiple_of(raw.to(tl.pointer_type(KIND)), ALIGN)


@triton.jit
def _squares(base, offsets, left, scale, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(base + offsets, mask=offsets < left, other=0.0).to(tl.float32)
    else:
        values = tl.load(base + offsets).to(tl.float32)
    values *= scale
    return values * values


@triton.jit
def _chunk_sum(base, left, scale, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Σ(x·scale)² of `left` elements. Only the last block is masked: masks prevent wide loads."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        if start + BLOCK <= left:
            total += _squares(base, start + lanes, left, scale, False)
        elif start < left:
            total += _squares(base, start + lanes, left, scale, True)
    return tl.sum(total, axis=0)


@triton.jit(
    do_not_specialize=["first", "tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE
)
def norms(
    table, chunk_tensor, hyper, grad_scale, partials, first, tensors, chunks,
    GRAD: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partials[0, chunk] = Σw² (0 without adaptation), partials[1, chunk] = Σ(g / scale)²."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = (chunk - tl.load(table + FIRST_CHUNK * tensors + tensor)) * CHUNK
    left = tl.minimum(tl.load(table + NUMEL * tensors + tensor) - start, CHUNK).to(tl.int32)
    inverse = tl.div_rn(1.0, tl.load(grad_scale).to(tl.float32))
    gradient = _address(table, GRADIENT, tensor, tensors, GRAD, ALIGN) + start
    tl.store(partials + chunks + chunk, _chunk_sum(gradient, left, inverse, CHUNK, BLOCK))
    group = tl.load(table + GROUP * tensors + tensor)
    weight_sum = 0.0
    if tl.load(hyper + group * COLUMNS + ADAPT) != 0:
        master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
        weight_sum = _chunk_sum(master, left, 1.0, CHUNK, BLOCK)
    tl.store(partials + chunk, weight_sum)


@triton.jit
def _ordered_sum(values, count, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    start = 0
    while start < count:  # not range(): Triton's interpreter cannot use a loaded bound
        total += tl.load(values + start + lanes, mask=start + lanes < count, other=0.0)
        start += WIDTH
    return tl.sum(total, axis=0)


@triton.jit
def _trust_ratio(row, weight_sum, gradient_sum):
    """λ of a tensor whose group has the hyper-parameters `row`, from sums of squares."""
    lr, weight_norm = tl.load(row + LR), tl.sqrt_rn(weight_sum)
    below = tl.sqrt_rn(gradient_sum) + tl.load(row + DECAY) * weight_norm + tl.load(row + EPS)
    value = tl.load(row + TRUST) * weight_norm / below
    clipped = tl.where(lr > 0, tl.minimum(value / lr, 1.0), 1.0)
    value = tl.where(tl.load(row + CLIP) != 0, clipped, value)
    usable = (weight_sum > 0) & (gradient_sum > 0) & (tl.abs(value) < float("inf"))
    usable = usable & (tl.load(row + ADAPT) != 0)
    return tl.where(usable, value, 1.0)


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE)
def ratios(
    table, hyper, active, partials, ratio, bad, tensors, chunks,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ratio[p] = λ, bad[p] = 1 where an active gradient is not finite; p counts parameters."""
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + tl.load(table + FIRST_CHUNK * tensors + tensor)
    weight_sum = _ordered_sum(begin, count, WIDTH)
    gradient_sum = _ordered_sum(begin + chunks, count, WIDTH)

    finite = tl.abs(gradient_sum) < float("inf")  # NaN compares false
    flagged = (tl.load(active + index) != 0) & (finite == 0)
    tl.store(bad + index, flagged.to(tl.float32))

    tl.store(ratio + index, _trust_ratio(row, weight_sum, gradient_sum))


@triton.jit
def _step_block(
    gradient, master, momentum, parameter, offsets, left,
    inverse, inside, outside, beta1, decay, nesterov, HALF: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        mask = offsets < left
        g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(master + offsets, mask=mask, other=0.0)
        v = tl.load(momentum + offsets, mask=mask, other=0.0)
    else:
        mask = None
        g = tl.load(gradient + offsets).to(tl.float32)
        w = tl.load(master + offsets)
        v = tl.load(momentum + offsets)
    push = (g * inverse + decay * w) * inside
    v = beta1 * v + push
    push = tl.where(nesterov, push + beta1 * v, v)
    w = w - outside * push
    tl.store(momentum + offsets, v, mask=mask)
    tl.store(master + offsets, w, mask=mask)
    if HALF is not None:
        tl.store(parameter + offsets, w.to(HALF), mask=mask)


@triton.jit
def _any(values, count, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    most = tl.zeros((WIDTH,), tl.float32)
    start = 0
    while start < count:
        loaded = tl.load(values + start + lanes, mask=start + lanes < count, other=0.0)
        most = tl.maximum(most, loaded)
        start += WIDTH
    return tl.max(most, axis=0)


@triton.jit(
    do_not_specialize=["first", "tensors", "parameters"], do_not_specialize_on_alignment=ANYWHERE
)
def update(
    table, chunk_tensor, hyper, grad_scale, found_inf, hold, active, ratio, bad, overflow,
    first, tensors, parameters,
    GRAD: tl.constexpr, HALF: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """v ← m·v + inside·(g / scale + βw); w ← w − outside·v, on one chunk, if nothing forbids it."""
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
        lr, lr_inside = tl.load(row + LR), tl.load(row + INSIDE) != 0
        inside = tl.load(ratio + index) * tl.where(lr_inside, lr, 1.0)
        outside = tl.where(lr_inside, 1.0, lr)
        beta1, decay = tl.load(row + BETA1), tl.load(row + DECAY)
        nesterov = tl.load(row + NESTEROV) != 0
        inverse = tl.div_rn(1.0, tl.load(grad_scale).to(tl.float32))
        gradient = _address(table, GRADIENT, tensor, tensors, GRAD, ALIGN) + start
        master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
        momentum = _address(table, MOMENTUM, tensor, tensors, tl.float32, ALIGN) + start
        parameter = master
        if HALF is not None:
            parameter = _address(table, PARAMETER, tensor, tensors, HALF, ALIGN) + start
        lanes = tl.arange(0, BLOCK)
        for block in range(0, CHUNK, BLOCK):
            if block + BLOCK <= left:
                _step_block(
                    gradient, master, momentum, parameter, block + lanes, left,
                    inverse, inside, outside, beta1, decay, nesterov, HALF, False,
                )  # fmt: skip
            elif block < left:
                _step_block(
                    gradient, master, momentum, parameter, block + lanes, left,
                    inverse, inside, outside, beta1, decay, nesterov, HALF, True,
                )  # fmt: skip
