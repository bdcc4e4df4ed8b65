"""The lists of `make ddp-conformance` and docs/custom-loops.md agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_has_the_number_of_known_failures() -> None:
    known = tomllib.loads((HERE / "known_failures.toml").read_text("utf-8"))
    passed = set((HERE / "passed_by_ddp.txt").read_text("utf-8").split())
    page = (HERE.parents[1] / "docs/custom-loops.md").read_text("utf-8")
    native, ring = ({*known[kind]} for kind in ("native", "ring"))
    assert native | ring <= passed
    counts = [len(passed), *(len(passed) - len(failed) for failed in (native, ring))]
    pattern = r"DDP itself passes (\d+).*?`pl.DataParallel`\s+passes (\d+), and (\d+)"
    (stated,) = re.findall(pattern, page, re.DOTALL)
    assert [int(count) for count in stated] == counts
