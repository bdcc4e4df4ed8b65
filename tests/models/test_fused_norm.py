"""The fused kernels, interpreted. `test_fused_gpu.py` runs them compiled."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason=f"triton has no wheel for {platform.machine()}, or is not installed",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "cases"), [("fused_cases.py", 150), ("fused_net_cases.py", 7)])
def test_in_tritons_interpreter(file: str, cases: int) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET as it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / file), "-q", "-p", "no:cacheprovider"],
        cwd=HERE.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= cases, done.stdout[-500:]
    assert "skipped" not in done.stdout
