"""The gradient exchange over NCCL with 2 and 4 ranks: every pair of factors, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccl.jobs import ROOT, finished, needs_gpu

pytestmark = needs_gpu


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [(2,), (1, 1), (4,), (2, 2), (3, 1)], ids=str)
def test_all_cases(nodes: tuple[int, ...], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    script = str(ROOT / "tests" / "nccl" / "suite.py")
    print(finished(nodes, [script, "--results", str(results)], tmp_path, limit_s=280))  # noqa: T201
    rows = json.loads(results.read_text())
    assert rows
    assert [row for row in rows if row["problems"]] == []
