"""Triton kernels of batch norm with ReLU, residual sum and max-pool, for channels-last activations.

An activation is a matrix of rows (pixels) × channels. Batch norm is memory-bound, so the cost is
the number of passes over an activation. The forward pass reads it twice and writes it once,
including ReLU and residual sum. The backward pass reads the activation and its gradient twice and
writes once.

Sums over rows are computed in two steps without atomics: first for each part of `span` rows, then
over all parts. The order is fixed, so repetitions are bit-identical. For variances, a part sums
deviations from its first row, and parts are joined by Chan's formula. This is precise even if the
mean is far from 0.

The pooling kernels never store the normalized activation at full size, the largest one of a ResNet.
The forward pass stores which of nine inputs is the largest (`NONE` if the ReLU returns 0), and the
backward pass passes the gradient to this input. Positions have 32 bits, because 64-bit division
would take longer than the memory accesses; offsets of elements have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(255)
FARTHEST_CENTRE = tl.constexpr(1e4)


@triton.jit
def moments_kernel(x, parts, rows, channels, span, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Computes mean and sum of squared deviations of each part of `span` rows, per channel.

    `parts` [2, parts, channels] receives the means, followed by the sums.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    first = part.to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    base = x + first * channels + cols[None, :]
    shift = tl.load(x + first * channels + cols, mask=col_ok, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    lines = tl.arange(0, BLOCK_M)[:, None]
    for row in range(0, count, BLOCK_M):
        ok = (row + lines < count) & col_ok[None, :]
        value = tl.load(base + (row + lines) * channels, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(ok, value - shift[None, :], 0.0)
        total += value
        square += value * value
    sums = tl.sum(total, 0)
    squares = tl.sum(square, 0)
    mean_at = parts + part * channels + cols
    tl.store(mean_at, shift + sums / count, mask=col_ok)
    second = tl.num_programs(0) * channels
    tl.store(mean_at + second, squares - sums * sums / count, mask=col_ok)


@triton.jit
def store_statistics(
    mean, m2, weight, bias, running_mean, running_var, tracked, saved, offset,
    rows, channels, momentum, eps, cols, col_ok, halves, OFFSET: tl.constexpr,
):  # fmt: skip
    """Stores mean, 1/σ, scale and shift in the rows of `saved`, and updates running statistics.

    `mean` and `m2` are the mean and the sum of squared deviations of `rows` rows. `halves`, if not
    None, receives the scale in fp16, and the shift that maps the mean to β with this rounded scale.
    """
    inverse = 1.0 / tl.sqrt(m2 / rows + eps)
    scale = tl.load(weight + cols, mask=col_ok, other=0.0) * inverse
    shift = tl.load(bias + cols, mask=col_ok, other=0.0) - mean * scale
    tl.store(saved + cols, mean, mask=col_ok)
    tl.store(saved + channels + cols, inverse, mask=col_ok)
    tl.store(saved + 2 * channels + cols, scale, mask=col_ok)
    tl.store(saved + 3 * channels + cols, shift, mask=col_ok)
    if halves is not None:
        half = scale.to(tl.float16)
        tl.store(halves + cols, half, mask=col_ok)
        shift = tl.load(bias + cols, mask=col_ok, other=0.0) - mean * half.to(tl.float32)
        tl.store(halves + channels + cols, shift.to(tl.float16), mask=col_ok)
    old_mean = tl.load(running_mean + cols, mask=col_ok, other=0.0)
    old_var = tl.load(running_var + cols, mask=col_ok, other=0.0)
    if OFFSET:
        mean += tl.load(offset + cols, mask=col_ok, other=0.0)
    tl.store(running_mean + cols, old_mean + momentum * (mean - old_mean), mask=col_ok)
    # Like torch, the running variance is unbiased.
    tl.store(running_var + cols, old_var + momentum * (m2 / (rows - 1) - old_var), mask=col_ok)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def statistics_kernel(
    means, weight, bias, running_mean, running_var, tracked, saved, offset,
    rows, channels, span, parts, momentum, eps, halves,
    OFFSET: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Combines the results of `moments_kernel` over all parts and calls `store_statistics`."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    lines = tl.arange(0, BLOCK_P)[:, None]
    m2s = means + parts * channels
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + lines
        ok = (part < parts) & col_ok[None, :]
        share = tl.minimum(rows - part.to(tl.int64) * span, span).to(tl.float32) / rows
        total += tl.load(means + part * channels + cols[None, :], mask=ok, other=0.0) * share
    mean = tl.sum(total, 0)
    spread = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + lines
        ok = (part < parts) & col_ok[None, :]
        size = tl.minimum(rows - part.to(tl.int64) * span, span).to(tl.float32)
        away = tl.load(means + part * channels + cols[None, :], mask=ok, other=0.0) - mean[None, :]
        inner = tl.load(m2s + part * channels + cols[None, :], mask=ok, other=0.0)
        spread += tl.where(ok, inner + away * away * size, 0.0)
    m2 = tl.sum(spread, 0)
    store_statistics(
        mean, m2, weight, bias, running_mean, running_var, tracked, saved, offset,
        rows, channels, momentum, eps, cols, col_ok, halves, OFFSET,
    )  # fmt: skip


@triton.jit
def centre_of(running_mean, cols, col_ok):
    """Returns the value that fused convolutions subtract before they sum: the running mean.

    Sums of deviations from a value near the mean keep their precision. The value is 0 if the
    running mean is very large, or infinite or NaN after an overflow.
    """
    centre = tl.load(running_mean + cols, mask=col_ok, other=0.0)
    return tl.where(tl.abs(centre) < FARTHEST_CENTRE, centre, 0.0)


@triton.jit
def centred_statistics_kernel(
    sums, weight, bias, running_mean, running_var, tracked, saved, offset,
    rows, channels, span, parts, momentum, eps, halves,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes mean and variance from sums and sums of squares, and calls `store_statistics`.

    The values were summed after subtraction of `centre_of` if `CENTRED`, else unchanged.
    """
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    lines = tl.arange(0, BLOCK_P)[:, None]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        ok = (start + lines < parts) & col_ok[None, :]
        at = (start + lines) * channels + cols[None, :]
        total += tl.load(sums + at, mask=ok, other=0.0)
        square += tl.load(sums + parts * channels + at, mask=ok, other=0.0)
    away = tl.sum(total, 0) / rows
    m2 = tl.sum(square, 0) - away * away * rows
    # For a constant channel, rounding may give a negative value, which becomes 0. NaN stays NaN.
    m2 = tl.maximum(m2, 0.0, propagate_nan=tl.PropagateNan.ALL)
    mean = away
    if CENTRED:
        mean = centre_of(running_mean, cols, col_ok) + away
    store_statistics(
        mean, m2, weight, bias, running_mean, running_var, tracked, saved, offset,
        rows, channels, momentum, eps, cols, col_ok, halves, OFFSET,
    )  # fmt: skip


@triton.jit
def apply_kernel(
    x, residual, y, saved, rows, channels, span,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes y = relu(scale · x + shift + residual)."""
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    lines = tl.arange(0, BLOCK_M)[:, None]
    first = tl.program_id(0).to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    base = first * channels + cols[None, :]
    for row in range(0, count, BLOCK_M):
        ok = (row + lines < count) & col_ok[None, :]
        at = base + (row + lines) * channels
        value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * scale + shift
        if RESIDUAL:
            value += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def backward_sums_kernel(
    dy, dy2, x, y, dz, saved, parts, rows, channels, span,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes Σ dz and Σ dz · (x − mean) over parts of `span` rows, for the gradients of γ and β.

    dz is the gradient of the ReLU's input. With a residual, it is stored, because it is also the
    residual's gradient. Otherwise `backward_input_kernel` recomputes it. With `TWO`, two operations
    read the output, and the gradients `dy` and `dy2` are added.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    mean = tl.load(saved + cols, mask=col_ok, other=0.0)[None, :]
    scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    first = part.to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    base = first * channels + cols[None, :]
    lines = tl.arange(0, BLOCK_M)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for row in range(0, count, BLOCK_M):
        ok = (row + lines < count) & col_ok[None, :]
        at = base + (row + lines) * channels
        grad = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(dy2 + at, mask=ok, other=0.0).to(tl.float32)
        if RELU:
            if RESIDUAL:
                lit = tl.load(y + at, mask=ok, other=0.0).to(tl.float32) > 0.0
            else:
                lit = value * scale + shift > 0.0
            grad = tl.where(lit, grad, 0.0)
        if RESIDUAL:
            tl.store(dz + at, grad.to(dz.dtype.element_ty), mask=ok)
        total += grad
        product += tl.where(ok, grad * (value - mean), 0.0)
    sum_at = parts + part * channels + cols
    tl.store(sum_at, tl.sum(total, 0), mask=col_ok)
    tl.store(sum_at + tl.num_programs(0) * channels, tl.sum(product, 0), mask=col_ok)


@triton.jit
def backward_factors_kernel(
    sums, weight, saved, found, rows, channels, parts,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of γ and β, and the factors a, b and c, from the sums of all parts.

    The gradient of the norm's input is dx = a · dz + b · x + c.
    """
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    lines = tl.arange(0, BLOCK_P)[:, None]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        ok = (start + lines < parts) & col_ok[None, :]
        at = (start + lines) * channels + cols[None, :]
        total += tl.load(sums + at, mask=ok, other=0.0)
        product += tl.load(sums + parts * channels + at, mask=ok, other=0.0)
    mean = tl.load(saved + cols, mask=col_ok, other=0.0)
    inverse = tl.load(saved + channels + cols, mask=col_ok, other=0.0)
    dshift = tl.sum(total, 0)
    dscale = tl.sum(product, 0) * inverse
    a = tl.load(weight + cols, mask=col_ok, other=0.0) * inverse
    b = -a * inverse * dscale / rows
    tl.store(found + cols, dscale, mask=col_ok)
    tl.store(found + channels + cols, dshift, mask=col_ok)
    tl.store(found + 2 * channels + cols, a, mask=col_ok)
    tl.store(found + 3 * channels + cols, b, mask=col_ok)
    tl.store(found + 4 * channels + cols, -a * dshift / rows - b * mean, mask=col_ok)


@triton.jit
def backward_input_kernel(
    dz, dz2, x, dx, saved, found, rows, channels, span,
    TWO: tl.constexpr, RELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes dx = a · dz + b · x + c, the gradient of a norm's input.

    With `RELU`, the argument `dz` is the gradient of the ReLU's output, to which the mask is
    applied. With `TWO`, `dz2` is added to it.
    """
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    a = tl.load(found + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    b = tl.load(found + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    c = tl.load(found + 4 * channels + cols, mask=col_ok, other=0.0)[None, :]
    scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    lines = tl.arange(0, BLOCK_M)[:, None]
    first = tl.program_id(0).to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    base = first * channels + cols[None, :]
    for row in range(0, count, BLOCK_M):
        ok = (row + lines < count) & col_ok[None, :]
        at = base + (row + lines) * channels
        grad = tl.load(dz + at, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(dz2 + at, mask=ok, other=0.0).to(tl.float32)
        if RELU:
            grad = tl.where(value * scale + shift > 0.0, grad, 0.0)
        tl.store(dx + at, (a * grad + b * value + c).to(dx.dtype.element_ty), mask=ok)


@triton.jit
def pool_kernel(
    x, y, winner, saved, positions, height, width, out_height, out_width, channels,
    PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes max_pool(relu(scale · x + shift)) with a 3 × 3 window and stride 2.

    A program computes BLOCK_M output positions and BLOCK_C channels. `winner` receives the number
    of the largest input in its window.
    """
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    across = at % out_width
    down = (at // out_width) % out_height
    image = at // (out_width * out_height)
    best = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    which = tl.full((BLOCK_M, BLOCK_C), NONE, tl.int32)
    inside = at < positions
    for tap in tl.static_range(9):
        row = 2 * down - PAD + tap // 3
        col = 2 * across - PAD + tap % 3
        here = inside & (row >= 0) & (row < height) & (col >= 0) & (col < width)
        place = ((image * height + row) * width + col).to(tl.int64) * channels
        ok = here[:, None] & col_ok[None, :]
        value = tl.load(x + place[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        value = value * scale + shift
        # NaN propagates, as in torch, so that an overflow is detected.
        wins = ok & ((value > best) | (value != value))
        best = tl.where(wins, value, best)
        which = tl.where(wins, tap, which)
    out = at[:, None].to(tl.int64) * channels + cols[None, :]
    ok = inside[:, None] & col_ok[None, :]
    tl.store(y + out, best.to(y.dtype.element_ty), mask=ok)
    tl.store(winner + out, which.to(tl.uint8), mask=ok)


@triton.jit
def pool_sums_kernel(
    dy, dy2, x, winner, saved, parts,
    positions, height, width, out_height, out_width, channels, span,
    TWO: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes Σ dz and Σ dz · (x − mean) for parts of the pool's output positions.

    Sums over the pooled positions suffice, because only the largest input of a window has a
    gradient.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    mean = tl.load(saved + cols, mask=col_ok, other=0.0)[None, :]
    first = part * span
    count = tl.minimum(positions - first, span)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, count, BLOCK_M):
        row_ok = start + tl.arange(0, BLOCK_M) < count
        at = first + start + tl.arange(0, BLOCK_M)
        ok = row_ok[:, None] & col_ok[None, :]
        place = at[:, None].to(tl.int64) * channels + cols[None, :]
        tap = tl.load(winner + place, mask=ok, other=NONE).to(tl.int32)
        lit = ok & (tap != NONE)
        grad = tl.load(dy + place, mask=lit, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(dy2 + place, mask=lit, other=0.0).to(tl.float32)
        across = at % out_width
        down = (at // out_width) % out_height
        image = at // (out_width * out_height)
        row = 2 * down[:, None] - PAD + tap // 3
        col = 2 * across[:, None] - PAD + tap % 3
        source = (image[:, None] * height + row) * width + col
        source = source.to(tl.int64) * channels + cols[None, :]
        value = tl.load(x + source, mask=lit, other=0.0).to(tl.float32)
        total += grad
        product += tl.where(lit, grad * (value - mean), 0.0)
    sum_at = parts + part * channels + cols
    tl.store(sum_at, tl.sum(total, 0), mask=col_ok)
    tl.store(sum_at + tl.num_programs(0) * channels, tl.sum(product, 0), mask=col_ok)


@triton.jit
def pool_input_kernel(
    dy, dy2, x, winner, dx, found, quads, height, width, out_height, out_width, channels,
    TWO: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes dx = a · dz + b · x + c for all positions of the norm's input, four at a time.

    With a padding of 1, the positions (2i, 2j) to (2i + 1, 2j + 1) are only in the windows (i, j)
    to (i + 1, j + 1), so four windows are read for four positions. Without padding, the indices of
    these positions and windows are lower by one.
    """
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    a = tl.load(found + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
    b = tl.load(found + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
    c = tl.load(found + 4 * channels + cols, mask=col_ok, other=0.0)[None, :]
    quads_across, quads_down = (width + 2 - PAD) // 2, (height + 2 - PAD) // 2
    j = at % quads_across
    i = (at // quads_across) % quads_down
    image = at // (quads_across * quads_down)
    inside = at < quads
    g00 = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    g01, g10, g11 = g00, g00, g00
    for window in tl.static_range(4):
        out_row = i - 1 + PAD + window // 2
        out_col = j - 1 + PAD + window % 2
        here = inside & (out_row >= 0) & (out_row < out_height)
        here = here & (out_col >= 0) & (out_col < out_width)
        place = (image * out_height + out_row) * out_width + out_col
        place = place[:, None].to(tl.int64) * channels + cols[None, :]
        ok = here[:, None] & col_ok[None, :]
        tap = tl.load(winner + place, mask=ok, other=NONE).to(tl.int32)
        grad = tl.load(dy + place, mask=ok, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(dy2 + place, mask=ok, other=0.0).to(tl.float32)
        # `tap` is a position in the 3 × 3 window, counted row by row.
        if window == 0:
            g00 += tl.where(tap == 4, grad, 0.0)
            g01 += tl.where(tap == 5, grad, 0.0)
            g10 += tl.where(tap == 7, grad, 0.0)
            g11 += tl.where(tap == 8, grad, 0.0)
        elif window == 1:
            g01 += tl.where(tap == 3, grad, 0.0)
            g11 += tl.where(tap == 6, grad, 0.0)
        elif window == 2:
            g10 += tl.where(tap == 1, grad, 0.0)
            g11 += tl.where(tap == 2, grad, 0.0)
        else:
            g11 += tl.where(tap == 0, grad, 0.0)
    for corner in tl.static_range(4):
        row = 2 * i - 1 + PAD + corner // 2
        col = 2 * j - 1 + PAD + corner % 2
        here = inside & (row >= 0) & (row < height) & (col >= 0) & (col < width)
        place = (image * height + row) * width + col
        place = place[:, None].to(tl.int64) * channels + cols[None, :]
        ok = here[:, None] & col_ok[None, :]
        if corner == 0:
            grad = g00
        elif corner == 1:
            grad = g01
        elif corner == 2:
            grad = g10
        else:
            grad = g11
        value = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx + place, (a * grad + b * value + c).to(dx.dtype.element_ty), mask=ok)
