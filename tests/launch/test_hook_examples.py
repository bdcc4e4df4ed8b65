"""The examples with DDP's communication hook run as they stand, each where its library is."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import is_launchers

pytestmark = pytest.mark.xdist_group("processes")  # needs no `reference`
ROOT = Path(__file__).parent.parent.parent
NEEDS = {"ddp": "torch", "lightning": "lightning", "accelerate": "accelerate"}


@pytest.mark.parametrize("name", NEEDS)
def test_all_ranks_end_with_equal_weights(name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    env = {key: value for key, value in os.environ.items() if not is_launchers(key)}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    example = [sys.executable, str(ROOT / "examples" / f"{name}_hook.py")]
    command = [*example, "--ranks", "2", "--wire", "float16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    found = re.search(
        r"2 ranks on cpu, float16 wire: loss (.*) to (.*), (\d+) buckets, weights equal", line
    )
    assert found, line
    assert float(found[2]) < float(found[1])
    assert int(found[3]) > 0
