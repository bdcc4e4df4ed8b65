"""The lists of `make ddp-conformance` and docs/custom-loops.md agree."""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_has_the_number_of_known_failures() -> None:
    known = tomllib.loads((HERE / "known_failures.toml").read_text("utf-8"))
    passed = set((HERE / "passed_by_ddp.txt").read_text("utf-8").split())
    page = (HERE.parents[1] / "docs/custom-loops.md").read_text("utf-8")
    native, ring = ({*known[kind]} for kind in ("native", "ring"))
    assert native | ring <= passed
    counts = (
        f"DDP passes {len(passed)} of them, `pl.DataParallel` {len(passed) - len(native)}, "
        f"and {len(passed) - len(ring)} with `algorithm"
    )
    assert counts in " ".join(page.split())
