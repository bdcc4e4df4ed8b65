"""Prints the tables of the large-batch series from its results.

    python tools/large_batch_table.py DIR/results.jsonl... [--epochs 30]

1. The loss of each large batch against the best small-batch run of the same set, model and length: the
   best mean over seeds among all that was tried at the small batch, other ingredients included.
2. What each ingredient and optimizer is worth: its difference to the rule, at equal cells.
3. All cells: mean, spread and number of seeds, so that every try is seen.

Standard errors are √(s₁²/n₁ + s₂²/n₂) per set; a mean over k sets has √Σ(error²) / k. Where a cell has
one seed there is none. Cells without a top-1 (diverged or refused) are listed and count in no mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Place = tuple[str, str, int]  # set, model, epochs
Way = tuple[str, str]  # optimizer, ingredient
RULE: Way = ("rule", "rule")


@dataclass(frozen=True)
class Sample:
    """Top-1 of the seeds of one cell."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def variance_of_mean(self) -> float | None:
        if len(self.values) < 2:
            return None
        return statistics.variance(self.values) / len(self.values)

    def __str__(self) -> str:
        if len(self.values) < 2:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ± {statistics.stdev(self.values):.2f}"


@dataclass(frozen=True)
class Difference:
    points: float
    error: float | None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.points:+.2f}{error}"


def difference(of: Sample, to: Sample) -> Difference:
    """`of` − `to`."""
    parts = (of.variance_of_mean, to.variance_of_mean)
    known = [part for part in parts if part is not None]
    error = math.sqrt(sum(known)) if len(known) == 2 else None
    return Difference(of.mean - to.mean, error)


def mean_difference(found: Sequence[Difference]) -> Difference:
    errors = [d.error for d in found if d.error is not None]
    error = (
        math.sqrt(sum(e * e for e in errors)) / len(found) if len(errors) == len(found) else None
    )
    return Difference(statistics.fmean(d.points for d in found), error)


def collect(records: Iterable[Record]) -> dict[Place, dict[str, dict[Way, Sample]]]:
    """Place → batch → way → seeds; the latest record of a cell counts."""
    latest = {record["key"]: record for record in records}
    tops: dict[tuple[Place, str, Way], list[float]] = defaultdict(list)
    for record in latest.values():
        if record.get("top1") is not None:
            place = (record["set"], record["model"], record["epochs"])
            way = (record["optimizer"], record["ingredient"])
            tops[place, record["batch"], way].append(float(record["top1"]))
    found: dict[Place, dict[str, dict[Way, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for (place, batch, way), values in tops.items():
        found[place][batch][way] = Sample(tuple(values))
    return found


def best_small(ways: dict[Way, Sample]) -> tuple[Way, Sample]:
    """Returns the best mean of those with the most seeds."""
    most = max(len(sample.values) for sample in ways.values())
    full = {way: sample for way, sample in ways.items() if len(sample.values) == most}
    way = max(full, key=lambda w: full[w].mean)
    return way, full[way]


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def loss_table(records: Iterable[Record]) -> list[str]:
    """Losses are negative points."""
    found, rows = collect(records), []
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, model, epochs in sorted(found, key=lambda p: (p[1], -p[2], p[0])):
        groups[model, epochs].append(name)
    for (model, epochs), names in groups.items():
        by_batch: dict[str, list[Difference]] = defaultdict(list)
        for name in names:
            cells = found[name, model, epochs]
            if not cells.get("small"):
                continue
            way, small = best_small(cells["small"])
            row = [name, model, str(epochs), f"{small} ({_named(way)})"]
            for batch in ("20", "5"):
                sample = cells.get(batch, {}).get(RULE)
                if sample is None:
                    row.append("–")
                    continue
                lost = difference(sample, small)
                by_batch[batch].append(lost)
                row.append(f"{sample}: {lost}")
            rows.append(row)
        means = [str(mean_difference(by_batch[b])) if by_batch[b] else "–" for b in ("20", "5")]
        if any(len(values) > 1 for values in by_batch.values()):
            rows.append(["**mean over sets**", model, str(epochs), "", *means])
    header = ("set", "model", "epochs", "best small batch", "20 steps an epoch", "5 steps an epoch")
    return _lines(header, rows)


def _named(way: Way) -> str:
    optimizer, ingredient = way
    return optimizer if ingredient == "rule" else f"{optimizer}, {ingredient}"


def ingredient_table(records: Iterable[Record]) -> list[str]:
    """Each way against the rule on the sets that have both."""
    found = collect(records)
    apart: dict[tuple[str, str, int, Way], dict[str, Difference]] = defaultdict(dict)
    for (name, model, epochs), cells in found.items():
        for batch, ways in cells.items():
            base = ways.get(RULE) if batch != "small" else ways.get(("sgd", "rule"))
            for way, sample in ways.items():
                if base is not None and sample is not base:
                    apart[batch, model, epochs, way][name] = difference(sample, base)
    rows = []
    for (batch, model, epochs, way), by_set in sorted(apart.items()):
        listed = ", ".join(f"{name} {by_set[name]}" for name in sorted(by_set))
        mean = mean_difference(list(by_set.values()))
        base_name = "sgd" if batch == "small" else "the rule"
        rows.append([batch, model, str(epochs), _named(way), base_name, str(mean), listed])
    header = ("batch", "model", "epochs", "changed", "against", "mean", "by set")
    return _lines(header, rows)


def cell_table(records: Iterable[Record]) -> list[str]:
    records = list(records)
    found, rows = collect(records), []
    for place in sorted(found):
        for batch, ways in sorted(found[place].items()):
            for way, sample in sorted(ways.items()):
                seeds = str(len(sample.values))
                rows.append([*map(str, place), batch, _named(way), str(sample), seeds])
    failed = [r for r in records if r.get("top1") is None]
    lines = _lines(("set", "model", "epochs", "batch", "way", "top-1", "seeds"), rows)
    return lines + [f"- {r['key']}: {r.get('error', 'no result')}" for r in failed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--epochs", type=int, help="only runs of this length")
    options = parser.parse_args(arguments)
    records: list[Record] = []
    for path in options.results:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            records += [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            print(f"large_batch_table: error: {path}: {error}", file=sys.stderr)
            return 1
    if options.epochs is not None:
        records = [record for record in records if record["epochs"] == options.epochs]
    for title, table in (
        ("Loss against the best small-batch run (points of top-1)", loss_table),
        ("What each ingredient is worth", ingredient_table),
        ("All cells", cell_table),
    ):
        print(f"## {title}", *table(records), "", sep="\n")
    commits = sorted({str(record.get("commit")) for record in records})
    print(f"{len(records)} runs at {', '.join(commits)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
