from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("fused_cases.py")
ROOT = CASES.parent.parent.parent


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason=f"triton has no wheel for {platform.machine()}, or is not installed",
)


def test_the_kernels_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET as it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, done.stdout[-500:]
    assert "skipped" not in done.stdout


def test_compiled_for_a_gpu_every_whole_block_moves_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Triton falls back to single elements without a word where it cannot prove the alignment."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(CASES.with_name("wide_loads.py"))],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
