"""Triton kernels of LARS, SGD, AdamW and LAMB, each over many tensors given by tables of addresses.

One program processes a chunk: at most CHUNK elements of one tensor. `norms` computes Σw² and Σg² of each
chunk. For LARS and SGD, `ratios` adds these sums by tensor and computes λ and a non-finite flag. It adds
in a fixed order without atomics, so the result is bit-reproducible. Then `update` writes masters,
momenta and parameters.

For AdamW and LAMB, `flags` marks non-finite gradients, and `moments` updates both averages and, for
AdamW, the weights. For LAMB, `trust` computes λ of each tensor from the sums that `moments` stored, and
`apply` changes the weights. Finally `advance` counts the step. If a flag or switch forbids the step, no
kernel changes weights or optimizer state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Switches may be views at any address. A recompilation for a new alignment would break a graph capture.
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
SECOND = tl.constexpr(8)  # only for AdamW and LAMB

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
# Columns that differ for AdamW and LAMB, as in `AdamHyper`.
BETA2 = tl.constexpr(3)
ADAM_EPS = tl.constexpr(5)
REST2 = tl.constexpr(6)


@triton.jit
def _address(table, row: tl.constexpr, tensor, tensors, KIND: tl.constexpr, ALIGN: tl.constexpr):
    raw = tl.load(table + row * tensors + tensor)
    return tl.multiple_of(raw.to(tl.pointer_type(KIND)), ALIGN)


@triton.jit
def _span(table, chunk, tensor, tensors, CHUNK: tl.constexpr):
    """Returns the offset of a chunk in its tensor and the number of elements of the chunk."""
    start = (chunk - tl.load(table + FIRST_CHUNK * tensors + tensor)) * CHUNK
    return start, tl.minimum(tl.load(table + NUMEL * tensors + tensor) - start, CHUNK).to(tl.int32)


@triton.jit
def _may_step(overflow, found_inf, hold, active, index):
    """Returns True if no flag or switch forbids the step of parameter `index`."""
    go = (overflow == 0) & (tl.load(found_inf) == 0) & (tl.load(hold) == 0)
    return go & (tl.load(active + index) != 0)


@triton.jit
def _load(base, offsets, left, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(base + offsets, mask=offsets < left, other=0.0).to(tl.float32)
    return tl.load(base + offsets).to(tl.float32)


@triton.jit
def _squares(base, offsets, left, scale, MASKED: tl.constexpr):
    values = _load(base, offsets, left, MASKED) * scale
    return values * values


@triton.jit
def _chunk_sum(base, left, scale, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Returns Σ(x·scale)² of `left` elements. Masks only the last block, so that loads are wide."""
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
    """Computes partials[0, chunk] = Σw² (0 without adaptation) and partials[1, chunk] = Σ(g/scale)²."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start, left = _span(table, chunk, tensor, tensors, CHUNK)
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
    """Returns λ of a tensor from sums of squares; `row` points to the group's hyper-parameters."""
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
    """Sets ratio[p] = λ for parameter p, and bad[p] = 1 if p is active and its gradient not finite."""
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
    mask = offsets < left if MASKED else None
    g = _load(gradient, offsets, left, MASKED)
    w, v = _load(master, offsets, left, MASKED), _load(momentum, offsets, left, MASKED)
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
    """Updates one chunk if allowed: v ← m·v + inside·(g / scale + βw); w ← w − outside·v."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    flagged = _any(bad, parameters, WIDTH)
    if tl.program_id(0) == 0:
        tl.store(overflow, flagged)
    if _may_step(flagged, found_inf, hold, active, index):
        start, left = _span(table, chunk, tensor, tensors, CHUNK)
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


# --- AdamW and LAMB ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE)
def flags(
    table, active, partials, bad, tensors, chunks, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Sets bad[p] = 1 if parameter p is active and its gradient is not finite, otherwise 0."""
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + chunks + tl.load(table + FIRST_CHUNK * tensors + tensor)
    finite = tl.abs(_ordered_sum(begin, count, WIDTH)) < float("inf")  # NaN compares false
    flagged = (tl.load(active + index) != 0) & (finite == 0)
    tl.store(bad + index, flagged.to(tl.float32))


@triton.jit
def _direction(m, v, w, correction1, root2, eps, decay):
    """Returns m̂ / (√v̂ + eps) + βw; `root2` is the square root of the bias correction of v."""
    return (m / correction1) / (tl.sqrt_rn(v) / root2 + eps) + decay * w


@triton.jit
def _moments_block(
    gradient, master, first, second, parameter, offsets, left,
    inverse, lr, beta1, rest1, beta2, rest2, correction1, root2, eps, decay,
    HALF: tl.constexpr, ADAPTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Updates the averages and, without ADAPTS, the weights. Returns the direction's squared elements."""
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
    """Updates the averages of one chunk: m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g².

    Then updates the weights for AdamW. For LAMB, stores the direction's sum of squares instead.
    """
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    flagged = _any(bad, parameters, WIDTH)
    if tl.program_id(0) == 0:
        tl.store(overflow, flagged)
    if _may_step(flagged, found_inf, hold, active, index):
        start, left = _span(table, chunk, tensor, tensors, CHUNK)
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
    """Sets ratio[p] = ‖w‖ / (‖u‖ + eps), or 1 without adaptation or if the step is skipped."""
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + tl.load(table + FIRST_CHUNK * tensors + tensor)
    weight_sum = _ordered_sum(begin, count, WIDTH)
    direction_sum = _ordered_sum(begin + chunks, count, WIDTH)
    value = tl.sqrt_rn(weight_sum) / (tl.sqrt_rn(direction_sum) + tl.load(row + EPS))
    value = tl.where(tl.load(row + CLIP) != 0, tl.minimum(value, 1.0), value)
    go = _may_step(tl.load(overflow), found_inf, hold, active, index)
    usable = (weight_sum > 0) & (direction_sum > 0) & (tl.abs(value) < float("inf"))
    usable = usable & (tl.load(row + ADAPT) != 0) & go
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
    """Updates one chunk: w ← w − lr·λ·u. Computes u again from the averages."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    if _may_step(tl.load(overflow), found_inf, hold, active, index):
        start, left = _span(table, chunk, tensor, tensors, CHUNK)
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
    """Adds 1 to steps[p] if no flag or switch forbade the step of parameter p."""
    index = tl.load(table + INDEX * tensors + tl.program_id(0))
    if _may_step(tl.load(overflow), found_inf, hold, active, index):
        tl.store(steps + index, tl.load(steps + index) + 1.0)
