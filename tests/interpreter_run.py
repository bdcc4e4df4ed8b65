"""Runs test files that need Triton's interpreter in separate processes.

Triton reads TRITON_INTERPRET when it is imported, so the calling process cannot run them itself.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason=f"triton has no wheel for {platform.machine()}, or is not installed",
)


def run_interpreted(*cases: Path, at_least: int, timeout_s: float = 280) -> None:
    """Fails unless at least so many tests pass, and none is skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, cases), "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= at_least, done.stdout[-500:]
    assert "skipped" not in done.stdout
