"""Triton kernels of Muon, each over many matrices given by tables of addresses.

There are two kinds of kernels. Some process chunks of elements, as in `kernels`: `average` computes the
averaged gradients, and `result_sums` and `update` apply the orthogonalized gradients. The others multiply
matrices by tiles: `gram`, `polynomial` and `apply` make one Newton-Schulz iteration. Each launch covers
matrices of all shapes, so that small matrices use the processors that large matrices leave idle. Sums
have a fixed order, and no kernel uses atomics, so results are bit-reproducible.

The products use padded copies of the matrices, with sizes that are multiples of the tile's depth. The
padding is zero. A matrix is tall if it has more rows than columns; Xᵀ·X then replaces X·Xᵀ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.optim.kernels import (
    ADAPT,
    ANYWHERE,
    BETA1,
    COLUMNS,
    DECAY,
    FIRST_CHUNK,
    GRADIENT,
    GROUP,
    INDEX,
    LR,
    MASTER,
    MOMENTUM,
    NESTEROV,
    NUMEL,
    PARAMETER,
    _address,
    _any,
    _load,
    _may_step,
    _ordered_sum,
    _span,
    _trust_ratio,
)

# Rows of the table of matrices. Iterations alternate between the first two addresses.
SOURCE = tl.constexpr(0)
RESULT = tl.constexpr(1)
SQUARE = tl.constexpr(2)
POLYNOMIAL = tl.constexpr(3)
PADDED_ROWS = tl.constexpr(4)
PADDED_COLUMNS = tl.constexpr(5)
TRUE_ROWS = tl.constexpr(6)
TRUE_COLUMNS = tl.constexpr(7)

# Rows of `partials` (sums per chunk), then rows of `numbers` (scalars per matrix).
SUM_AVERAGE = tl.constexpr(0)
SUM_GRADIENT = tl.constexpr(1)
SUM_WEIGHT = tl.constexpr(2)
SUM_RESULT = tl.constexpr(3)
INVERSE_NORM = tl.constexpr(0)
ONE = tl.constexpr(1)
FACTOR = tl.constexpr(2)

# Squares of smaller values underflow in fp32. The norm would be too small, and the iteration diverge.
TINY = tl.constexpr(1e-15)
A = tl.constexpr(3.4445)
B = tl.constexpr(-4.7750)
C = tl.constexpr(2.0315)


@triton.jit
def _field(table, row: tl.constexpr, matrix, matrices):
    return tl.load(table + row * matrices + matrix)


@triton.jit
def _places(start, offsets, columns, padded):
    """Converts offsets of elements in a matrix to offsets in the padded copy of the matrix."""
    flat = start.to(tl.int32) + offsets
    row = flat // columns.to(tl.int32)
    return row * padded.to(tl.int32) + (flat - row * columns.to(tl.int32))


@triton.jit
def _averages(gradient, momentum, offsets, left, inverse, beta1, nesterov, MASKED: tl.constexpr):
    """Returns g, the next momentum v ← m·v + (1−m)·g, and the average: v, or its Nesterov variant."""
    g = _load(gradient, offsets, left, MASKED) * inverse
    v = _load(momentum, offsets, left, MASKED)
    fresh = (1.0 - beta1) * g
    v = beta1 * v + fresh
    return g, v, tl.where(nesterov, beta1 * v + fresh, v)


@triton.jit
def _average_block(
    gradient, momentum, master, source, start, offsets, left, columns, padded,
    inverse, beta1, nesterov, adapt, stored,
    KIND: tl.constexpr, MASKED: tl.constexpr, PADS: tl.constexpr,
):  # fmt: skip
    g, _, u = _averages(gradient, momentum, offsets, left, inverse, beta1, nesterov, MASKED)
    mask = offsets < left if MASKED else None
    if stored:
        if PADS:
            tl.store(source + _places(start, offsets, columns, padded), u.to(KIND), mask=mask)
        else:
            tl.store(source + start + offsets, u.to(KIND), mask=mask)
    w = tl.zeros_like(g)
    if adapt:
        w = _load(master, offsets, left, MASKED)
    return u * u, g * g, w * w


@triton.jit(
    do_not_specialize=["first", "tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE
)
def average(
    table, matrices, chunk_tensor, hyper, grad_scale, partials, first, tensors, chunks,
    GRAD: tl.constexpr, KIND: tl.constexpr, PADS: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes averaged gradients into the source matrices of the products. Changes no state.

    Also writes the sums of squares of the averages, the unscaled gradients and, with adaptation, the
    masters to `partials`.
    """
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start, left = _span(table, chunk, tensor, tensors, CHUNK)
    row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
    beta1, nesterov = tl.load(row + BETA1), tl.load(row + NESTEROV) != 0
    adapt = tl.load(row + ADAPT) != 0
    inverse = tl.div_rn(1.0, tl.load(grad_scale).to(tl.float32))
    gradient = _address(table, GRADIENT, tensor, tensors, GRAD, ALIGN) + start
    momentum = _address(table, MOMENTUM, tensor, tensors, tl.float32, ALIGN) + start
    master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
    source = _address(matrices, SOURCE, tensor, tensors, KIND, 16)
    stored = _field(matrices, SOURCE, tensor, tensors) != 0
    columns = _field(matrices, TRUE_COLUMNS, tensor, tensors)
    padded = _field(matrices, PADDED_COLUMNS, tensor, tensors)
    lanes = tl.arange(0, BLOCK)
    average_sum = tl.zeros((BLOCK,), tl.float32)
    gradient_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK, BLOCK):
        if block + BLOCK <= left:
            u, g, w = _average_block(
                gradient, momentum, master, source, start, block + lanes, left, columns, padded,
                inverse, beta1, nesterov, adapt, stored, KIND, False, PADS,
            )  # fmt: skip
            average_sum += u
            gradient_sum += g
            weight_sum += w
        elif block < left:
            u, g, w = _average_block(
                gradient, momentum, master, source, start, block + lanes, left, columns, padded,
                inverse, beta1, nesterov, adapt, stored, KIND, True, PADS,
            )  # fmt: skip
            average_sum += u
            gradient_sum += g
            weight_sum += w
    tl.store(partials + SUM_AVERAGE * chunks + chunk, tl.sum(average_sum, axis=0))
    tl.store(partials + SUM_GRADIENT * chunks + chunk, tl.sum(gradient_sum, axis=0))
    tl.store(partials + SUM_WEIGHT * chunks + chunk, tl.sum(weight_sum, axis=0))


@triton.jit
def _sum_of(table, partials, row: tl.constexpr, tensor, tensors, chunks,
            CHUNK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    count = tl.cdiv(tl.load(table + NUMEL * tensors + tensor), CHUNK).to(tl.int32)
    begin = partials + row * chunks + tl.load(table + FIRST_CHUNK * tensors + tensor)
    return _ordered_sum(begin, count, WIDTH)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def norms(table, partials, numbers, tensors, chunks, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Computes for each matrix the factor 1 / norm, which makes the norm at most 1."""
    tensor = tl.program_id(0)
    total = _sum_of(table, partials, SUM_AVERAGE, tensor, tensors, chunks, CHUNK, WIDTH)
    inverse = tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(total), TINY))
    tl.store(numbers + INVERSE_NORM * tensors + tensor, inverse)


# --- products ------------------------------------------------------------------------------------


@triton.jit
def _wrapped(first, limit, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Returns the row or column indices of a tile, wrapped into the matrix so that loads need no mask."""
    places = (first + tl.arange(0, TILE)) % limit
    return tl.max_contiguous(tl.multiple_of(places, DEPTH), DEPTH)


@triton.jit
def _side(table, row: tl.constexpr, matrix, matrices, DEPTH: tl.constexpr):
    return tl.multiple_of(tl.load(table + row * matrices + matrix).to(tl.int32), DEPTH)


@triton.jit
def _rows_by_rows(x, m, n, columns, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Computes a tile of X·Xᵀ: the inner products of the rows m with the rows n."""
    depth = tl.arange(0, DEPTH)
    left = x + m[:, None] * columns + depth[None, :]
    right = x + n[:, None] * columns + depth[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, columns, DEPTH):
        total = tl.dot(tl.load(left), tl.trans(tl.load(right)), total)
        left += DEPTH
        right += DEPTH
    return total


@triton.jit
def _columns_by_columns(x, m, n, rows, columns, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Computes a tile of Xᵀ·X: the inner products of the columns m with the columns n."""
    start = tl.arange(0, DEPTH)[:, None] * columns
    left, right = x + start + m[None, :], x + start + n[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, rows, DEPTH):
        total = tl.dot(tl.trans(tl.load(left)), tl.load(right), total)
        left += DEPTH * columns
        right += DEPTH * columns
    return total


@triton.jit
def _store_both(target, values, m, n, side, mirrored):
    """Stores a tile of a symmetric matrix and, if `mirrored`, the transposed tile."""
    mask = (m < side)[:, None] & (n < side)[None, :]
    tl.store(target + m[:, None] * side + n[None, :], values, mask=mask)
    if mirrored:
        mask = (n < side)[:, None] & (m < side)[None, :]
        tl.store(target + n[:, None] * side + m[None, :], tl.trans(values), mask=mask)


@triton.jit(do_not_specialize=["source", "scale_row", "matrices"])
def gram(
    table, tiles, numbers, source, scale_row, matrices,
    KIND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes a tile, on or above the diagonal, of S = f²·X·Xᵀ, or of f²·Xᵀ·X for tall matrices."""
    entry = tiles + tl.program_id(0) * 3
    matrix, i, j = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    x = tl.load(table + source * matrices + matrix).to(tl.pointer_type(KIND))
    x = tl.multiple_of(x, 16)
    rows = _side(table, PADDED_ROWS, matrix, matrices, DEPTH)
    columns = _side(table, PADDED_COLUMNS, matrix, matrices, DEPTH)
    side = tl.multiple_of(tl.minimum(rows, columns), DEPTH)
    m, n = _wrapped(i * TILE, side, TILE, DEPTH), _wrapped(j * TILE, side, TILE, DEPTH)
    if rows > columns:
        total = _columns_by_columns(x, m, n, rows, columns, TILE, DEPTH)
    else:
        total = _rows_by_rows(x, m, n, columns, TILE, DEPTH)
    scale = tl.load(numbers + scale_row * matrices + matrix)
    # Multiplies twice by the factor, because the squared factor could come close to fp32's limit.
    values = (total * scale * scale).to(KIND)
    square = _address(table, SQUARE, matrix, matrices, KIND, 16)
    lanes = tl.arange(0, TILE)
    _store_both(square, values, i * TILE + lanes, j * TILE + lanes, side, i != j)


@triton.jit(do_not_specialize=["matrices"])
def polynomial(table, tiles, matrices, KIND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Computes a tile, on or above the diagonal, of P = b·S + c·S·S."""
    entry = tiles + tl.program_id(0) * 3
    matrix, i, j = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    square = _address(table, SQUARE, matrix, matrices, KIND, 16)
    rows = _side(table, PADDED_ROWS, matrix, matrices, DEPTH)
    side = tl.minimum(rows, _side(table, PADDED_COLUMNS, matrix, matrices, DEPTH))
    side = tl.multiple_of(side, DEPTH)
    m, n = _wrapped(i * TILE, side, TILE, DEPTH), _wrapped(j * TILE, side, TILE, DEPTH)
    total = _rows_by_rows(square, m, n, side, TILE, DEPTH)  # S is symmetric: S·Sᵀ = S·S
    own = tl.load(square + m[:, None] * side + n[None, :]).to(tl.float32)
    values = (own * B + total * C).to(KIND)
    target = _address(table, POLYNOMIAL, matrix, matrices, KIND, 16)
    lanes = tl.arange(0, TILE)
    _store_both(target, values, i * TILE + lanes, j * TILE + lanes, side, i != j)


@triton.jit(do_not_specialize=["source", "target", "scale_row", "matrices"])
def apply(
    table, tiles, numbers, source, target, scale_row, matrices,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes a tile of the next X, f·(a·X + P·X), or f·(a·X + X·P) for tall matrices."""
    entry = tiles + tl.program_id(0) * 3
    matrix, i, j = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    x_address = tl.load(table + source * matrices + matrix)
    p_address = tl.load(table + POLYNOMIAL * matrices + matrix)
    rows = _side(table, PADDED_ROWS, matrix, matrices, DEPTH)
    columns = _side(table, PADDED_COLUMNS, matrix, matrices, DEPTH)
    tall = rows > columns
    left_address = tl.where(tall, x_address, p_address)
    right_address = tl.where(tall, p_address, x_address)
    x = tl.multiple_of(x_address.to(tl.pointer_type(KIND)), 16)
    left = tl.multiple_of(left_address.to(tl.pointer_type(KIND)), 16)
    right = tl.multiple_of(right_address.to(tl.pointer_type(KIND)), 16)
    side = tl.multiple_of(tl.minimum(rows, columns), DEPTH)
    m, n = _wrapped(i * HEIGHT, rows, HEIGHT, DEPTH), _wrapped(j * WIDTH, columns, WIDTH, DEPTH)
    depth = tl.arange(0, DEPTH)
    # Both factors are row-major: the left factor has `side` columns, the right one `columns`.
    left += m[:, None] * side + depth[None, :]
    right += depth[:, None] * columns + n[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for _ in range(0, side, DEPTH):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH * columns
    own = tl.load(x + m[:, None] * columns + n[None, :]).to(tl.float32)
    scale = tl.load(numbers + scale_row * matrices + matrix)
    values = (own * A + total) * scale
    m, n = i * HEIGHT + tl.arange(0, HEIGHT), j * WIDTH + tl.arange(0, WIDTH)
    # Zero times NaN is NaN, but the padding must stay zero for the next step.
    true_rows = tl.load(table + TRUE_ROWS * matrices + matrix).to(tl.int32)
    true_columns = tl.load(table + TRUE_COLUMNS * matrices + matrix).to(tl.int32)
    values = tl.where((m < true_rows)[:, None] & (n < true_columns)[None, :], values, 0.0)
    out = tl.load(table + target * matrices + matrix).to(tl.pointer_type(KIND))
    out = tl.multiple_of(out, 16) + m[:, None] * columns + n[None, :]
    tl.store(out, values.to(KIND), mask=(m < rows)[:, None] & (n < columns)[None, :])


# --- the update ----------------------------------------------------------------------------------


@triton.jit
def _results(
    result, start, offsets, left, columns, padded, MASKED: tl.constexpr, PADS: tl.constexpr
):
    places = _places(start, offsets, columns, padded) if PADS else start + offsets
    if MASKED:
        return tl.load(result + places, mask=offsets < left, other=0.0).to(tl.float32)
    return tl.load(result + places).to(tl.float32)


@triton.jit(do_not_specialize=["first", "tensors", "chunks"])
def result_sums(
    table, matrices, chunk_tensor, partials, first, tensors, chunks,
    KIND: tl.constexpr, PADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the sum of squares of one chunk of an orthogonalized matrix."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start, left = _span(table, chunk, tensor, tensors, CHUNK)
    result = _address(matrices, RESULT, tensor, tensors, KIND, 16)
    columns = _field(matrices, TRUE_COLUMNS, tensor, tensors)
    padded = _field(matrices, PADDED_COLUMNS, tensor, tensors)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK, BLOCK):
        if block + BLOCK <= left:
            y = _results(result, start, block + lanes, left, columns, padded, False, PADS)
            total += y * y
        elif block < left:
            y = _results(result, start, block + lanes, left, columns, padded, True, PADS)
            total += y * y
    tl.store(partials + SUM_RESULT * chunks + chunk, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=ANYWHERE)
def ratios(
    table, hyper, active, partials, numbers, ratio, bad, tensors, chunks,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes for each matrix a factor, λ and a non-finite flag.

    The factor scales the orthogonalized matrix to the norm of the averaged gradient. The factor is 0 if
    the gradient is zero.
    """
    tensor = tl.program_id(0)
    index = tl.load(table + INDEX * tensors + tensor)
    row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
    average_sum = _sum_of(table, partials, SUM_AVERAGE, tensor, tensors, chunks, CHUNK, WIDTH)
    gradient_sum = _sum_of(table, partials, SUM_GRADIENT, tensor, tensors, chunks, CHUNK, WIDTH)
    weight_sum = _sum_of(table, partials, SUM_WEIGHT, tensor, tensors, chunks, CHUNK, WIDTH)
    result_sum = _sum_of(table, partials, SUM_RESULT, tensor, tensors, chunks, CHUNK, WIDTH)
    still = gradient_sum == 0
    result_norm = tl.sqrt_rn(result_sum)
    factor = tl.sqrt_rn(average_sum) / tl.maximum(result_norm, TINY)
    factor = tl.where(still, 0.0, factor)
    tl.store(numbers + FACTOR * tensors + tensor, factor)

    norm = tl.where(still, 0.0, factor * result_norm)
    finite = still | ((average_sum < float("inf")) & (result_sum < float("inf")))  # NaN: false
    finite = finite & (norm < float("inf"))
    flagged = (tl.load(active + index) != 0) & (finite == 0)
    tl.store(bad + index, flagged.to(tl.float32))
    tl.store(ratio + index, _trust_ratio(row, weight_sum, norm * norm))


@triton.jit
def _update_block(
    gradient, master, momentum, parameter, result, start, offsets, left, columns, padded,
    inverse, beta1, nesterov, factor, rate, decay,
    HALF: tl.constexpr, MASKED: tl.constexpr, PADS: tl.constexpr,
):  # fmt: skip
    _, v, _ = _averages(gradient, momentum, offsets, left, inverse, beta1, nesterov, MASKED)
    y = _results(result, start, offsets, left, columns, padded, MASKED, PADS)
    mask = offsets < left if MASKED else None
    w = _load(master, offsets, left, MASKED)
    # With a zero gradient only the decay applies, even if the average has overflowed.
    u = tl.where(factor == 0, 0.0, y * factor)
    w = w - rate * (u + decay * w)
    tl.store(momentum + offsets, v, mask=mask)
    tl.store(master + offsets, w, mask=mask)
    if HALF is not None:
        tl.store(parameter + offsets, w.to(HALF), mask=mask)


@triton.jit(
    do_not_specialize=["first", "tensors", "parameters"], do_not_specialize_on_alignment=ANYWHERE
)
def update(
    table, matrices, chunk_tensor, hyper, grad_scale, found_inf, hold, active,
    numbers, ratio, bad, overflow, first, tensors, parameters,
    GRAD: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr, PADS: tl.constexpr,
    ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Updates one chunk if allowed: v ← m·v + (1−m)·g; w ← w − lr·λ·(u + βw)."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    index = tl.load(table + INDEX * tensors + tensor)
    flagged = _any(bad, parameters, WIDTH)
    if tl.program_id(0) == 0:
        tl.store(overflow, flagged)
    if _may_step(flagged, found_inf, hold, active, index):
        start, left = _span(table, chunk, tensor, tensors, CHUNK)
        row = hyper + tl.load(table + GROUP * tensors + tensor) * COLUMNS
        beta1, nesterov = tl.load(row + BETA1), tl.load(row + NESTEROV) != 0
        rate, decay = tl.load(row + LR) * tl.load(ratio + index), tl.load(row + DECAY)
        factor = tl.load(numbers + FACTOR * tensors + tensor)
        inverse = tl.div_rn(1.0, tl.load(grad_scale).to(tl.float32))
        gradient = _address(table, GRADIENT, tensor, tensors, GRAD, ALIGN) + start
        master = _address(table, MASTER, tensor, tensors, tl.float32, ALIGN) + start
        momentum = _address(table, MOMENTUM, tensor, tensors, tl.float32, ALIGN) + start
        result = _address(matrices, RESULT, tensor, tensors, KIND, 16)
        columns = _field(matrices, TRUE_COLUMNS, tensor, tensors)
        padded = _field(matrices, PADDED_COLUMNS, tensor, tensors)
        parameter = master
        if HALF is not None:
            parameter = _address(table, PARAMETER, tensor, tensors, HALF, ALIGN) + start
        lanes = tl.arange(0, BLOCK)
        for block in range(0, CHUNK, BLOCK):
            if block + BLOCK <= left:
                _update_block(
                    gradient, master, momentum, parameter, result, start, block + lanes, left,
                    columns, padded, inverse, beta1, nesterov, factor, rate, decay,
                    HALF, False, PADS,
                )  # fmt: skip
            elif block < left:
                _update_block(
                    gradient, master, momentum, parameter, result, start, block + lanes, left,
                    columns, padded, inverse, beta1, nesterov, factor, rate, decay,
                    HALF, True, PADS,
                )  # fmt: skip
