"""Fits all-reduce costs on some emulated clusters and predicts others, at other sizes.

    python emulated.py [FOLDER]        (measured by measure.sh; raw/split is the folder that counts)
    python emulated.py raw each        (each of the developed clusters from the seven others)

The split was fixed before anything in `raw/split` was measured, and the model before that, on the eight
clusters in `raw`, which are all its development: none of the clusters and sizes to be predicted had been
measured then.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from paceline.plan.cost_fit import FittedCosts, Sample
from paceline.plan.script_player import Place

HERE = Path(__file__).parent
FIT_ON = ("2x2-100", "2x4-200", "4x4-200", "4x1-200", "4x2-400")
# To be predicted: in `raw`, what the model was developed on; in `raw/split`, what it had never seen.
DEVELOPED = ("3x3-300", "2x3-400", "4x3-100")
PREDICTED = ("6x1-150", "2x5-300", "5x2-200", "3x4-250")
# An emulated link counts whole Ethernet frames: 1514 bytes for 1448 of payload; and lets 32 KiB pass at
# once after a rest (bench/cluster/host_link.py). Both are known, not fitted.
FRAMES, BURST = 1514 / 1448, 32 * 1024


def samples(file: Path) -> list[Sample]:
    hosts, ranks, mbit = (int(part) for part in file.stem.replace("x", "-").split("-"))
    place = Place(hosts, ranks, FRAMES * 8e-6 / mbit, cores=2, burst_bytes=BURST)
    rows = json.loads(file.read_text())["rows"]
    return [Sample(place, row["algorithm"], row["bytes"], row["s"]) for row in rows]


def fit(folder: Path, names: Iterable[str]) -> FittedCosts:
    return FittedCosts.of(s for name in names for s in samples(folder / f"{name}.json"))


def predicted(fitted: FittedCosts, folder: Path, names: Iterable[str]) -> list[dict]:
    found = []
    for name in names:
        for sample in samples(folder / f"{name}.json"):
            guess = float(fitted.seconds(sample.algorithm, sample.place, sample.size_bytes))
            found.append({"cluster": name, "algorithm": sample.algorithm, "bytes": sample.size_bytes,
                          "measured_s": sample.seconds, "predicted_s": guess,
                          "error": guess / sample.seconds - 1})  # fmt: skip
    return found


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "raw" / "split"
    if sys.argv[2:] == ["each"]:
        names = (*FIT_ON, *DEVELOPED)
        rows = [r for n in names for r in predicted(fit(folder, set(names) - {n}), folder, (n,))]
        away = sorted(abs(row["error"]) for row in rows)
        print(f"{len(away)}: {spread(rows)}, nine in ten within {away[len(away) * 9 // 10]:.1%}")
        return
    fitted = fit(folder, FIT_ON)
    print(f"fit misses {fitted.spread:.1%} (root mean square)")
    found = predicted(fitted, folder, DEVELOPED if folder.name == "raw" else PREDICTED)
    for row in found:
        print(f"{row['cluster']:8} {row['algorithm']:12} {row['bytes']:8} {1e3 * row['measured_s']:8.1f} "
              f"{1e3 * row['predicted_s']:8.1f} {row['error']:+.1%}")  # fmt: skip
    for what in ("algorithm", "bytes", "cluster"):
        keys = dict.fromkeys(row[what] for row in found)
        print("; ".join(f"{key}: {spread(found, what, key)}" for key in keys))
    print(f"all {len(found)}: {spread(found)}")
    prices = {name: vars(one) for name, one in fitted.prices.items()}
    result = {"fit_on": FIT_ON, "prices": prices, "spread": fitted.spread, "rows": found}
    (HERE / f"emulated-{folder.name}.json").write_text(json.dumps(result, indent=1) + "\n")


def spread(found: list[dict], what: str = "", key: object = None) -> str:
    away = [abs(row["error"]) for row in found if not what or row[what] == key]
    return f"median {statistics.median(away):.1%}, worst {max(away):.1%}"


if __name__ == "__main__":
    main()
