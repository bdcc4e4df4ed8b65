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

from paceline.optim import adam_kernels, fused, lars_kernels

KINDS = {"table": "*i64", "chunk_tensor": "*i32"}
NUMBERS = {"first", "tensors", "chunks", "parameters"}


def wide(kernel: Any, **more: Any) -> list[int]:
    """Number of 16-byte loads and stores in the compiled kernel."""
    constants = {"ALIGN": 16, "CHUNK": fused.CHUNK, "BLOCK": fused.BLOCK, **more}
    signature, values = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "i32" if name in NUMBERS else KINDS.get(name, "*fp32")
        if name in constants:
            signature[name] = "constexpr"
            values[(position,)] = constants[name]
    source = ASTSource(kernel, signature, values, {})
    options = {"num_warps": fused.WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return [len(re.findall(rf"{op}\.global\S*\.v4\.b32", ptx)) for op in ("ld", "st")]


if __name__ == "__main__":
    per_thread = fused.BLOCK // (32 * fused.WARPS)
    half, full = per_thread // 8, per_thread // 4  # 16 bytes hold 8 or 4 numbers
    width = {"WIDTH": fused.WIDTH}
    found = wide(lars_kernels.norms, GRAD=tl.float16)
    assert found == [half + full, 0], found
    found = wide(lars_kernels.update, GRAD=tl.float16, HALF=tl.float16, **width)
    assert found == [half + 2 * full, half + 2 * full], found
    found = wide(lars_kernels.update, GRAD=tl.float32, HALF=None, **width)
    assert found == [3 * full, 2 * full], found
    both = {"ADAPTS": False, **width}
    found = wide(adam_kernels.moments, GRAD=tl.float16, HALF=tl.float16, **both)
    assert found == [half + 3 * full, half + 3 * full], found
    found = wide(adam_kernels.moments, GRAD=tl.float16, HALF=None, **both | {"ADAPTS": True})
    assert found == [half + 3 * full, 2 * full], found
    found = wide(adam_kernels.apply, HALF=tl.float16)
    assert found == [3 * full, half + full], found
    # These move single numbers; they must only compile.
    wide(adam_kernels.flags, **width)
    wide(adam_kernels.trust, **width)
    wide(adam_kernels.advance)
