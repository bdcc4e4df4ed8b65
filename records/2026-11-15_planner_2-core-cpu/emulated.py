"""Fits all-reduce costs on some emulated clusters and predicts others.

bash emulated.sh && python emulated.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from paceline.plan.cost_fit import FittedCosts, Place, Sample

HERE = Path(__file__).parent
FIT_ON = ("2x2-100", "2x4-200", "4x4-200", "4x1-200", "4x2-400")
PREDICT = ("3x3-300", "2x3-400", "4x3-100")


def samples(name: str) -> list[Sample]:
    hosts, rest = name.split("x")
    ranks, mbit = rest.split("-")
    place = Place(int(hosts), int(ranks), 8e-6 / float(mbit))
    rows = json.loads((HERE / "raw" / f"{name}.json").read_text())["rows"]
    return [Sample(place, row["algorithm"], row["bytes"], row["s"]) for row in rows]


def main() -> None:
    fitted = FittedCosts.of(s for name in FIT_ON for s in samples(name))
    print(f"fit misses {fitted.spread:.1%} (root mean square)")
    found = []
    for name in PREDICT:
        for sample in samples(name):
            guess = float(fitted.seconds(sample.algorithm, sample.place, sample.size_bytes))
            found.append({"cluster": name, "algorithm": sample.algorithm, "bytes": sample.size_bytes,
                          "measured_s": sample.seconds, "predicted_s": guess,
                          "error": guess / sample.seconds - 1})  # fmt: skip
    away = [abs(row["error"]) for row in found]
    for row in found:
        print(f"{row['cluster']:8} {row['algorithm']:12} {row['bytes']:8} {1e3 * row['measured_s']:8.1f} "
              f"{1e3 * row['predicted_s']:8.1f} {row['error']:+.1%}")  # fmt: skip
    print(f"median {statistics.median(away):.1%}, worst {max(away):.1%} of {len(away)}")
    result = {"prices": fitted.prices, "spread": fitted.spread, "rows": found}
    (HERE / "emulated.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
