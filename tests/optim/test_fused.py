from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from interpreter_run import needs_triton, run_interpreted

CASES = Path(__file__).with_name("fused_cases.py")
ROOT = CASES.parent.parent.parent


pytestmark = needs_triton


def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(CASES, CASES.with_name("fused_muon_cases.py"), at_least=34)


def test_compiled_for_a_gpu_every_whole_block_moves_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Triton silently falls back to single elements where it cannot prove the alignment."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(CASES.with_name("wide_loads.py"))],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
