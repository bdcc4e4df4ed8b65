"""The lists of `make ddp-conformance` and the table in docs/own-loop.md agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_lists_every_known_failure() -> None:
    known = tomllib.loads((HERE / "known_failures.toml").read_text("utf-8"))
    passed = set((HERE / "passed_by_ddp.txt").read_text("utf-8").split())
    page = (HERE.parents[1] / "docs/own-loop.md").read_text("utf-8")
    rows = re.findall(r"^\| `(test_\w+)`(, with `ring`)? \|", page, re.MULTILINE)
    native, ring = ({*known[kind]} for kind in ("native", "ring"))
    assert {name for name, only_ring in rows if not only_ring} == native
    assert {name for name, _ in rows} == ring
    assert ring <= passed
    counts = (
        f"DDP passes {len(passed)} of them\nhere, `pl.DataParallel` {len(passed) - len(native)}, "
    )
    assert f"{counts}and {len(passed) - len(ring)} with" in page
