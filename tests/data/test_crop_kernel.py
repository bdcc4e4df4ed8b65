from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from interpreter_run import needs_triton, run_interpreted

CASES = Path(__file__).with_name("crop_cases.py")
ROOT = CASES.parent.parent.parent

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.data.on_device.crop_kernel import crop_kernel as kernel

for hole, interleaved in ((0, False), (16, True)):
    values = {"SIZE": 224, "HOLE": hole, "INTERLEAVED": interleaved, "BLOCK": 256}
    kinds = {"table": "*i64", "boxes": "*fp64", "out": "*u8", **dict.fromkeys(values, "constexpr")}
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    triton.compile(ASTSource(kernel, kinds, constants, {}), target=GPUTarget("cuda", 90, 32))
"""

pytestmark = needs_triton


def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(CASES, at_least=4)


def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("interleaved", [False, True])
def test_on_a_gpu_real_sizes_are_pillows_within_a_level(interleaved: bool) -> None:
    from paceline.data.on_device import crop_kernel as kernel

    draw = np.random.default_rng(5)
    size, held, wanted = 224, [], []
    table, doubles = kernel.new_table(40)
    for i in range(40):
        width, height = draw.integers(30, 900, 2).tolist()
        image = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        left, top = draw.uniform(0, width * 0.7), draw.uniform(0, height * 0.7)
        box = (left, top, draw.uniform(left + 5, width), draw.uniform(top + 5, height))
        flip = bool(draw.integers(2))
        planes = image if interleaved else image.transpose(2, 0, 1).copy()
        held.append(torch.from_numpy(planes).cuda())
        table[i, :7] = (held[-1].data_ptr(), height, width, flip, i, 0, 0)
        doubles[i, kernel.BOX :] = box
        square = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box)
        wanted.append(
            np.asarray(square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else square)
        )
    out = torch.empty((40, size, size, 3), dtype=torch.uint8, device="cuda")
    kernel.crop_into(out, torch.from_numpy(table).cuda(), hole=0, interleaved=interleaved)
    apart = np.abs(out.cpu().numpy().astype(int) - np.stack(wanted).astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.25  # Pillow sums tall images down first
