"""Compiles the kernels for an H200 without one, and counts their 16-byte loads and stores.

Run by `test_fused.py` in its own process.
"""

from __future__ import annotations

import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.optim import fused, kernels, muon_kernels
from paceline.optim.fused_muon import TILING

KINDS = {"table": "*i64", "matrices": "*i64", "chunk_tensor": "*i32", "tiles": "*i32"}
NUMBERS = {"first", "tensors", "chunks", "parameters", "source", "target", "scale_row"}


def compiled(kernel: Any, numbers: set[str], warps: int, stages: int, **constants: Any) -> str:
    signature, values = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "i32" if name in numbers else KINDS.get(name, "*fp32")
        if name in constants:
            signature[name] = "constexpr"
            values[(position,)] = constants[name]
    source = ASTSource(kernel, signature, values, {})
    options = {"num_warps": warps, "num_stages": stages}
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


def wide(kernel: Any, **more: Any) -> list[int]:
    """Number of 16-byte loads and stores in the compiled kernel."""
    constants = {"ALIGN": 16, "CHUNK": fused.CHUNK, "BLOCK": fused.BLOCK, **more}
    ptx = compiled(kernel, NUMBERS, fused.WARPS, 3, **constants)
    return [len(re.findall(rf"{op}\.global\S*\.v4\.b32", ptx)) for op in ("ld", "st")]


def check_product(kernel: Any, operands: int, stores: int, **tile: int) -> None:
    """Tensor cores, operands fetched 16 bytes at a time, `stores` numbers written likewise."""
    constants = {"KIND": tl.bfloat16, "DEPTH": TILING.depth, **tile}
    numbers = NUMBERS | {"matrices"}  # their count; in other kernels their table
    ptx = compiled(kernel, numbers, TILING.warps, TILING.stages, **constants)
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx
    copies = re.findall(r"cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    assert {int(size, 0) for size in copies} == {16}, set(copies)
    per_copy = 8 * 32 * TILING.warps
    assert len(copies) == TILING.stages * operands // per_copy, len(copies)
    written = re.findall(r"st\.global\S*", ptx)
    assert len(written) == stores // per_copy, written
    assert all(".v4.b32" in store for store in written), written


if __name__ == "__main__":
    per_thread = fused.BLOCK // (32 * fused.WARPS)
    half, full = per_thread // 8, per_thread // 4  # 16 bytes hold 8 or 4 numbers
    width = {"WIDTH": fused.WIDTH}
    found = wide(kernels.norms, GRAD=tl.float16)
    assert found == [half + full, 0], found
    found = wide(kernels.update, GRAD=tl.float16, HALF=tl.float16, **width)
    assert found == [half + 2 * full, half + 2 * full], found
    found = wide(kernels.update, GRAD=tl.float32, HALF=None, **width)
    assert found == [3 * full, 2 * full], found
    both = {"ADAPTS": False, **width}
    found = wide(kernels.moments, GRAD=tl.float16, HALF=tl.float16, **both)
    assert found == [half + 3 * full, half + 3 * full], found
    found = wide(kernels.moments, GRAD=tl.float16, HALF=None, **both | {"ADAPTS": True})
    assert found == [half + 3 * full, 2 * full], found
    found = wide(kernels.apply, HALF=tl.float16)
    assert found == [3 * full, half + full], found
    muon = {"KIND": tl.bfloat16, "PADS": False}
    found = wide(muon_kernels.average, GRAD=tl.float16, **muon)
    assert found == [half + 2 * full, half], found
    found = wide(muon_kernels.result_sums, **muon)
    assert found == [half, 0], found
    found = wide(muon_kernels.update, GRAD=tl.float16, HALF=tl.float16, **muon, **width)
    assert found == [2 * half + 2 * full, half + 2 * full], found
    square, tile = TILING.square, TILING.height * TILING.width
    # Two loops, for tall and other matrices; a tile and its mirror image.
    operands = 2 * square * TILING.depth
    check_product(muon_kernels.gram, 2 * operands, 2 * square**2, TILE=square)
    check_product(muon_kernels.polynomial, operands, 2 * square**2, TILE=square)
    operands = (TILING.height + TILING.width) * TILING.depth
    sides = {"HEIGHT": TILING.height, "WIDTH": TILING.width}
    check_product(muon_kernels.apply, operands, tile, **sides)
    # These move single numbers; they must only compile.
    wide(kernels.flags, **width)
    wide(kernels.trust, **width)
    wide(kernels.advance)
    wide(muon_kernels.norms, **width)
    wide(muon_kernels.ratios, **width)
    wide(muon_kernels.update, GRAD=tl.float32, HALF=None, **muon | {"PADS": True}, **width)
