"""Programs in a Python process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "."))


def run_python(
    *words: str, cwd: Path | None = None, timeout_s: float = 280.0
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` with the package, the tests and the benchmarks on its path."""
    env = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, timeout=timeout_s, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
