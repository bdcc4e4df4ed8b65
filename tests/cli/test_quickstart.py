"""The promise to a newcomer. Minutes long: `make test-slow`. Its time is in the records, not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstart_reaches_89_percent(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "paceline", "train", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run")], capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["top1"] >= 89
    assert summary["world_size"] == ranks
    assert f"report: {tmp_path / 'run/report.html'}" in done.stdout
