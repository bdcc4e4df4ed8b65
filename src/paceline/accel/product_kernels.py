"""Triton kernels of 1 × 1 convolutions fused with the batch norms around them.

A convolution is a product of two matrices: the operand (rows × channels in channels-last memory)
and the weight. `FORM` tells how the operand is computed while it is loaded. `PLAIN`: it is read
from memory. `NORMALIZED`: relu(scale · x + shift). `JOINED`: relu(scale · x + shift + residual),
the output of a residual block. `PROJECTED`: the same with a normalized residual. `GRADIENT`: a · dz
+ b · x + c, the gradient of a norm's input (see `backward_factors_kernel`).

`EPILOGUE` tells what is applied to each tile of the result in registers. `MOMENTS` sums the
statistics of the next norm. `MASKED` applies the ReLU mask of the previous norm to a gradient.
`MERGED` does the same for the sum and ReLU of a residual block. `MASKED` and `MERGED` also sum the
gradients of γ and β.

A program computes one block of columns of `span` rows (a part), tile by tile, and keeps sums in
registers. Threads combine their sums only after the last tile, because doing this for each tile
would take most of the instructions. Most tiles are computed as their transpose (`TURNED`): tensor
cores return two rows of many columns to a thread, which are many rows of two columns of the
original tile. Parts are joined in a fixed order, so repetitions are bit-identical. Values are
rounded to the activations' type wherever the separate operators store them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.accel.kernels import centre_of

PLAIN = tl.constexpr(0)
NORMALIZED = tl.constexpr(1)
JOINED = tl.constexpr(2)
GRADIENT = tl.constexpr(3)
MOMENTS = tl.constexpr(4)
MASKED = tl.constexpr(5)
MERGED = tl.constexpr(6)
PROJECTED = tl.constexpr(7)


@triton.jit
def _operand(
    x, other, saved, found, at, ok, cols, col_ok, channels,
    FORM: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Loads or computes a tile of the convolution's input, in the dtype of `x`.

    For `GRADIENT`, `x` is dz, `other` is the norm's input, and `found` has the factors; with
    `RELU`, `x` is the gradient after the norm's ReLU. For `PROJECTED`, `found` has the statistics
    of `other`.
    """
    value = tl.load(x + at, mask=ok, other=0.0)
    if FORM == NORMALIZED or FORM == JOINED or FORM == PROJECTED:  # noqa: SIM109
        scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
        shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
        wide = value.to(tl.float32) * scale + shift
        if FORM == JOINED:
            wide += tl.load(other + at, mask=ok, other=0.0).to(tl.float32)
        if FORM == PROJECTED:
            # The residual is rounded, because the separate operators store it.
            scale = tl.load(found + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
            shift = tl.load(found + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
            residual = tl.load(other + at, mask=ok, other=0.0).to(tl.float32) * scale + shift
            wide += residual.to(x.dtype.element_ty).to(tl.float32)
        wide = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = wide.to(x.dtype.element_ty)
    if FORM == GRADIENT:
        a = tl.load(found + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
        b = tl.load(found + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
        c = tl.load(found + 4 * channels + cols, mask=col_ok, other=0.0)[None, :]
        before = tl.load(other + at, mask=ok, other=0.0).to(tl.float32)
        grad = value.to(tl.float32)
        if RELU:
            scale = tl.load(saved + 2 * channels + cols, mask=col_ok, other=0.0)[None, :]
            shift = tl.load(saved + 3 * channels + cols, mask=col_ok, other=0.0)[None, :]
            grad = tl.where(before * scale + shift > 0.0, grad, 0.0)
        value = (a * grad + b * before + c).to(x.dtype.element_ty)
    return value


@triton.jit
def _columns(
    out_saved, out_other_saved, centre, cols, col_ok, n,
    EPILOGUE: tl.constexpr, PROJECT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Loads the per-channel values that the epilogue needs.

    These are the value that is subtracted before sums, the norm's scale and shift, and the mean of
    the norm of the residual.
    """
    middle = tl.zeros(cols.shape, tl.float32)
    scale, shift, other_middle = middle, middle, middle
    if EPILOGUE == MOMENTS:
        middle = centre_of(centre, cols, col_ok)
    if EPILOGUE == MASKED or EPILOGUE == MERGED:  # noqa: SIM109  (Triton has no `in`)
        middle = tl.load(out_saved + cols, mask=col_ok, other=0.0)
    if EPILOGUE == MASKED:
        scale = tl.load(out_saved + 2 * n + cols, mask=col_ok, other=0.0)
        shift = tl.load(out_saved + 3 * n + cols, mask=col_ok, other=0.0)
    if PROJECT:
        other_middle = tl.load(out_other_saved + cols, mask=col_ok, other=0.0)
    return (
        _along(middle, TURNED), _along(scale, TURNED), _along(shift, TURNED),
        _along(other_middle, TURNED),
    )  # fmt: skip


@triton.jit
def _along(vector, FIRST: tl.constexpr):
    """Makes a vector the first axis of a tile if `FIRST`, else the second axis."""
    return vector[:, None] if FIRST else vector[None, :]


@triton.jit
def _product(tile, factors, result, TURNED: tl.constexpr):
    if TURNED:
        result = tl.dot(factors, tl.trans(tile), result, input_precision="ieee")
    else:
        result = tl.dot(tile, factors, result, input_precision="ieee")
    return result


@triton.jit
def _part_of(maps, elements, DESCRIBED: tl.constexpr):
    """Advances a pointer to the rows of this program; leaves a tensor descriptor unchanged."""
    return maps if DESCRIBED else maps + elements


@triton.jit
def _tile_of(maps, at, ok, line, col, TURNED: tl.constexpr, DESCRIBED: tl.constexpr):
    if DESCRIBED:
        tile = maps.load([line, col])
        tile = tl.trans(tile) if TURNED else tile
    else:
        tile = tl.load(maps + at, mask=ok, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _finish(
    result, at, ok, line, col, out, out_x, out_y, out_add, out_other, y_tile,
    middle, scale, shift, other_middle, TYPE: tl.constexpr,
    EPILOGUE: tl.constexpr, ADD: tl.constexpr, PROJECT: tl.constexpr, LOADED: tl.constexpr,
    TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to a tile, stores it in `TYPE`, and returns the values to sum over rows.

    With `LOADED`, the tile of `out_y` is given as `y_tile` instead of loaded.
    """
    value, second, third = result, result, result
    if EPILOGUE == MASKED or EPILOGUE == MERGED:  # noqa: SIM109
        before = _tile_of(out_x, at, ok, line, col, TURNED, DESCRIBED)
        if EPILOGUE == MASKED:
            lit = ok & (before * scale + shift > 0.0)
        else:
            if ADD:
                result += _tile_of(out_add, at, ok, line, col, TURNED, DESCRIBED)
            if LOADED:
                lit = ok & (y_tile.to(tl.float32) > 0.0)
            else:
                lit = ok & (_tile_of(out_y, at, ok, line, col, TURNED, DESCRIBED) > 0.0)
        rounded = tl.where(lit, result, 0.0).to(TYPE)
        value = rounded.to(tl.float32)
        second = tl.where(ok, value * (before - middle), 0.0)
        if PROJECT:
            before = _tile_of(out_other, at, ok, line, col, TURNED, DESCRIBED)
            third = tl.where(ok, value * (before - other_middle), 0.0)
    else:
        rounded = result.to(TYPE)
        if EPILOGUE == MOMENTS:
            value = tl.where(ok, rounded.to(tl.float32) - middle, 0.0)
            second = value * value
    if DESCRIBED:
        out.store([line, col], tl.trans(rounded) if TURNED else rounded)
    else:
        tl.store(out + at, rounded, mask=ok)
    return value, second, third


@triton.jit
def _fold(
    value, TURNED: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums the rows of a tile that one thread (if `TURNED`, four threads of a warp) has.

    Rows are divided into `GROUPS` groups. In a group, a thread has rows at a distance of `LINES`.
    Threads and warps combine their sums only once, after the last tile.
    """
    if TURNED:
        folded = tl.sum(tl.reshape(value, (BLOCK_N, GROUPS, BLOCK_M // GROUPS)), 2)
    else:
        rows: tl.constexpr = BLOCK_M // GROUPS // LINES
        folded = tl.sum(tl.reshape(value, (GROUPS, rows, LINES, BLOCK_N)), 1)
    return folded


@triton.jit
def _no_sums(
    TURNED: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Returns zeros, to which results of `_fold` are added."""
    if TURNED:
        sums = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    else:
        sums = tl.zeros((GROUPS, LINES, BLOCK_N), tl.float32)
    return sums


@triton.jit
def _store_sums(
    sums, later, col_ok, total, second_total, third_total,
    PROJECT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    total = _whole(total, TURNED)
    tl.store(sums, total, mask=col_ok)
    tl.store(sums + later, _whole(second_total, TURNED), mask=col_ok)
    if PROJECT:
        tl.store(sums + 2 * later, total, mask=col_ok)
        tl.store(sums + 3 * later, _whole(third_total, TURNED), mask=col_ok)


@triton.jit
def _whole(folded, TURNED: tl.constexpr):
    return tl.sum(folded, 1) if TURNED else tl.sum(tl.sum(folded, 0), 0)


@triton.jit
def product_kernel(
    x, other, saved, found, side, weight, out, out_x, out_y, out_add, out_other,
    out_saved, out_other_saved, centre, parts, rows, span, k, n,
    FORM: tl.constexpr, RELU: tl.constexpr, SIDE: tl.constexpr, FORWARD: tl.constexpr,
    EPILOGUE: tl.constexpr, ADD: tl.constexpr, PROJECT: tl.constexpr, SINGLE: tl.constexpr,
    STAGES: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
    GROUPS: tl.constexpr, LINES: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes out [rows, n] = operand [rows, k] · weight, with an epilogue.

    The weight is stored as [n, k] if `FORWARD`, else as [k, n]. With `SIDE`, the operand is stored,
    too. `SINGLE` means k ≤ BLOCK_K, so that the weight is read once; otherwise the compiler fuses
    the loops over rows and k. `parts` [2, parts, n] receives two sums per part. For `MOMENTS`,
    these are Σ (y − centre) and Σ (y − centre)², else Σ dz and Σ dz · (x − mean) for the norm with
    input `out_x`. With `PROJECT`, `parts` is [4, parts, n] and includes the sums for the norm of
    `out_other`. With `TURNED`, a tile is computed as its transpose. With `DESCRIBED`, the
    activations of the epilogue are tensor descriptors. `_fold` explains `GROUPS` and `LINES`.
    """
    blocks = tl.cdiv(n, BLOCK_N)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = cols < n
    first = part.to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    lines = tl.arange(0, BLOCK_M)
    deep = tl.arange(0, BLOCK_K)
    sums = parts + part * n + cols
    later = (tl.num_programs(0) // blocks) * n
    x += first * k
    other += first * k
    side += first * k
    out = _part_of(out, first * n, DESCRIBED)
    out_x = _part_of(out_x, first * n, DESCRIBED)
    out_y = _part_of(out_y, first * n, DESCRIBED)
    out_add = _part_of(out_add, first * n, DESCRIBED)
    out_other = _part_of(out_other, first * n, DESCRIBED)
    if FORWARD:
        weight_at = weight + _along(deep, not TURNED) + _along(cols, TURNED) * k
    else:
        weight_at = weight + _along(deep, not TURNED) * n + _along(cols, TURNED)
    if SINGLE:
        if EVEN_K and EVEN_N:
            factors = tl.load(weight_at)
        else:
            ok = _along(deep < k, not TURNED) & _along(col_ok, TURNED)
            factors = tl.load(weight_at, mask=ok, other=0.0)
    middle, scale, shift, other_middle = _columns(
        out_saved, out_other_saved, centre, cols, col_ok, n, EPILOGUE, PROJECT, TURNED
    )
    total = _no_sums(TURNED, GROUPS, LINES, BLOCK_N)
    second_total, third_total = total, total
    for start in tl.range(0, count, BLOCK_M, num_stages=STAGES, flatten=not SINGLE):
        row = start + lines
        row_ok = tl.full((BLOCK_M,), True, tl.int1) if EVEN_M else row < count
        if TURNED:
            result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if SINGLE:
            deep_ok = deep < k
            ok = row_ok[:, None] if EVEN_K else row_ok[:, None] & deep_ok[None, :]
            at = row[:, None] * k + deep[None, :]
            tile = _operand(x, other, saved, found, at, ok, deep, deep_ok, k, FORM, RELU)
            if SIDE:
                tl.store(side + at, tile, mask=ok & (block == 0))
            result = _product(tile, factors, result, TURNED)
        else:
            for begin in range(0, k, BLOCK_K):
                inner = begin + deep
                deep_ok = inner < k
                ok = row_ok[:, None] if EVEN_K else row_ok[:, None] & deep_ok[None, :]
                at = row[:, None] * k + inner[None, :]
                tile = _operand(x, other, saved, found, at, ok, inner, deep_ok, k, FORM, RELU)
                if SIDE:
                    tl.store(side + at, tile, mask=ok & (block == 0))
                place = weight_at + (begin if FORWARD else begin * n)
                if EVEN_K and EVEN_N:
                    factors = tl.load(place)
                else:
                    ok = _along(deep_ok, not TURNED) & _along(col_ok, TURNED)
                    factors = tl.load(place, mask=ok, other=0.0)
                result = _product(tile, factors, result, TURNED)
        ok = _along(row_ok, not TURNED)
        if not EVEN_N:
            ok = ok & _along(col_ok, TURNED)
        at = _along(row, not TURNED) * n + _along(cols, TURNED)
        value, second, third = _finish(
            result, at, ok, (first + start).to(tl.int32), block * BLOCK_N,
            out, out_x, out_y, out_add, out_other, result, middle, scale, shift, other_middle,
            x.dtype.element_ty, EPILOGUE, ADD, PROJECT, False, TURNED, DESCRIBED,
        )  # fmt: skip
        if EPILOGUE != PLAIN:
            total += _fold(value, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_N)
            second_total += _fold(second, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_N)
        if PROJECT:
            third_total += _fold(third, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_N)
    if EPILOGUE != PLAIN:
        _store_sums(sums, later, col_ok, total, second_total, third_total, PROJECT, TURNED)


@triton.jit
def weight_gradient_kernel(
    dz, x, saved, found, inputs, input_saved, partial, rows, span, n, k,
    FORM: tl.constexpr, RELU: tl.constexpr, INPUT_FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes partial [part, n, k] = gradientᵀ · input over the rows of each part."""
    tiles_k = tl.cdiv(k, BLOCK_K)
    tiles = tl.cdiv(n, BLOCK_N) * tiles_k
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    outs = (tile // tiles_k) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    out_ok = outs < n
    in_ok = ins < k
    first = part.to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    dz += first * n
    x += first * n
    inputs += first * k
    lines = tl.arange(0, BLOCK_R)
    result = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, count, BLOCK_R):
        row = start + lines
        row_ok = (row < count)[:, None]
        ok = row_ok if EVEN else row_ok & out_ok[None, :]
        at = row[:, None] * n + outs[None, :]
        grad = _operand(dz, x, saved, found, at, ok, outs, out_ok, n, FORM, RELU)
        if FORM == GRADIENT:  # c makes masked rows nonzero
            grad = tl.where(row_ok, grad, 0.0).to(dz.dtype.element_ty)
        ok = row_ok if EVEN else row_ok & in_ok[None, :]
        at = row[:, None] * k + ins[None, :]
        value = _operand(
            inputs, inputs, input_saved, input_saved, at, ok, ins, in_ok, k, INPUT_FORM, False
        )
        result = tl.dot(tl.trans(grad), value, result, input_precision="ieee")
    place = partial + part.to(tl.int64) * n * k + outs[:, None] * k + ins[None, :]
    tl.store(place, result, mask=out_ok[:, None] & in_ok[None, :])


@triton.jit
def both_gradients_kernel(
    dz, x, saved, found, weight, inputs, input_saved, out, out_x, out_y, out_add, out_other,
    out_saved, out_other_saved, parts, partial, rows, span, n, k,
    FORM: tl.constexpr, RELU: tl.constexpr, INPUT_FORM: tl.constexpr, EPILOGUE: tl.constexpr,
    ADD: tl.constexpr, PROJECT: tl.constexpr, STAGES: tl.constexpr, TURNED: tl.constexpr,
    DESCRIBED: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of input and weight together, because they read the same activations.

    Does the work of `product_kernel`, for the input's gradient, and of `weight_gradient_kernel`.
    Channels must be few (n ≤ BLOCK_N and k ≤ BLOCK_K), so that the results fit into registers. With
    `MERGED`, `inputs` must be `out_y`, the output of the block.
    """
    part = tl.program_id(0)
    outs = tl.arange(0, BLOCK_N)
    ins = tl.arange(0, BLOCK_K)
    out_ok = outs < n
    in_ok = ins < k
    first = part.to(tl.int64) * span
    count = tl.minimum(rows - first, span).to(tl.int32)
    sums = parts + part * k + ins
    later = tl.num_programs(0) * k
    dz += first * n
    x += first * n
    inputs += first * k
    out = _part_of(out, first * k, DESCRIBED)
    out_x = _part_of(out_x, first * k, DESCRIBED)
    out_y = _part_of(out_y, first * k, DESCRIBED)
    out_add = _part_of(out_add, first * k, DESCRIBED)
    out_other = _part_of(out_other, first * k, DESCRIBED)
    lines = tl.arange(0, BLOCK_M)
    weight_at = weight + outs[:, None] * k + ins[None, :]
    factors = tl.load(weight_at, mask=out_ok[:, None] & in_ok[None, :], other=0.0)
    gathered = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if TURNED:
        factors = tl.trans(factors)
    middle, scale, shift, other_middle = _columns(
        out_saved, out_other_saved, saved, ins, in_ok, k, EPILOGUE, PROJECT, TURNED
    )
    total = _no_sums(TURNED, GROUPS, LINES, BLOCK_K)
    second_total, third_total = total, total
    for start in tl.range(0, count, BLOCK_M, num_stages=STAGES):
        row = start + lines
        row_ok = tl.full((BLOCK_M,), True, tl.int1) if EVEN_M else row < count
        ok = row_ok[:, None] if EVEN else row_ok[:, None] & out_ok[None, :]
        at = row[:, None] * n + outs[None, :]
        grad = _operand(dz, x, saved, found, at, ok, outs, out_ok, n, FORM, RELU)
        if FORM == GRADIENT:  # c makes masked rows nonzero
            grad = tl.where(row_ok[:, None], grad, 0.0).to(dz.dtype.element_ty)
        ok = row_ok[:, None] if EVEN else row_ok[:, None] & in_ok[None, :]
        at = row[:, None] * k + ins[None, :]
        source = _operand(
            inputs, inputs, input_saved, input_saved, at, ok, ins, in_ok, k, INPUT_FORM, False
        )
        gathered = tl.dot(tl.trans(grad), source, gathered, input_precision="ieee")
        if TURNED:
            result = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
            ok = row_ok[None, :] if EVEN else row_ok[None, :] & in_ok[:, None]
            at = row[None, :] * k + ins[:, None]
            source = tl.trans(source)
        else:
            result = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        result = _product(grad, factors, result, TURNED)
        value, second, third = _finish(
            result, at, ok, (first + start).to(tl.int32), 0,
            out, out_x, out_y, out_add, out_other, source, middle, scale, shift, other_middle,
            x.dtype.element_ty, EPILOGUE, ADD, PROJECT, True, TURNED, DESCRIBED,
        )  # fmt: skip
        if EPILOGUE != PLAIN:
            total += _fold(value, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_K)
            second_total += _fold(second, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_K)
        if PROJECT:
            third_total += _fold(third, TURNED, GROUPS, LINES, BLOCK_M, BLOCK_K)
    if EPILOGUE != PLAIN:
        _store_sums(sums, later, in_ok, total, second_total, third_total, PROJECT, TURNED)
    place = partial + part.to(tl.int64) * n * k + outs[:, None] * k + ins[None, :]
    tl.store(place, gathered, mask=out_ok[:, None] & in_ok[None, :])


@triton.jit
def join_products_kernel(
    partial, out, elements, parts, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Computes out [elements] as the sum of `partial` [parts, elements] over the parts."""
    at = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    at_ok = at < elements
    lines = tl.arange(0, BLOCK_P)
    total = tl.zeros((BLOCK_P, BLOCK_E), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + lines
        ok = (part < parts)[:, None] & at_ok[None, :]
        place = partial + part[:, None].to(tl.int64) * elements + at[None, :]
        total += tl.load(place, mask=ok, other=0.0)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=at_ok)
