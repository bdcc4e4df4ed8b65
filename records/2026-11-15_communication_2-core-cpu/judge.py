"""How far hybrid is behind the best single algorithm, size by size.

    python judge.py raw/allreduce-8.json

The best is picked on one half of the samples and compared on the other.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def main() -> None:
    by_size: dict[int, dict[str, list[float]]] = {}
    for row in json.loads(Path(sys.argv[1]).read_text())["rows"]:
        by_size.setdefault(row["bytes"], {})[row["algorithm"]] = row["samples_s"]
    for size, rows in by_size.items():
        picked = {n: statistics.median(s[0::2]) for n, s in rows.items() if n != "hybrid"}
        held = {n: statistics.median(s[1::2]) for n, s in rows.items()}
        best = min(picked, key=lambda name: picked[name])
        against = held["hybrid"] / held[best]
        faster = held["native"] / held["hybrid"]
        print(f"{size:9} hybrid {1e3 * held['hybrid']:8.2f} ms, best {best:16} x {against:.3f}, "
              f"{faster:.2f} x native")  # fmt: skip


if __name__ == "__main__":
    main()
