"""Tables of finished runs: mean accuracy and regret of each method, and regret of each rate."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Lines = Iterable[Mapping[str, Any]]
CellName = tuple[str, str, int]
OURS, OURS_ALL = "ours", "ours-all"
# Quantiles of Student's t distribution for 95 %, by degrees of freedom; the normal one from 30.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12,
      2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05)  # fmt: skip


def means(lines: Lines, key: str) -> dict[CellName, dict[Any, float]]:
    """Returns the mean accuracy over seeds, by cell and by the entry `key`. A failed run counts as 0."""
    values: dict[CellName, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        cell = (line["data"], line["net"], line["batch"])
        values[cell][line[key]].append(float(line.get("top1") or 0.0))
    return {
        cell: {name: statistics.fmean(each) for name, each in own.items()}
        for cell, own in values.items()
    }


def interval(values: list[float]) -> float:
    """Returns half the width of the 95 % interval of a mean."""
    if len(values) < 2:
        return math.nan
    quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _regrets(cells: Mapping[CellName, Mapping[Any, float]]) -> dict[Any, dict[CellName, float]]:
    """Returns each method's points behind the best method of a cell, by cell.

    Ours with its own warm-up and averaging is compared with the others, but not they with it.
    """
    regrets: dict[Any, dict[CellName, float]] = defaultdict(dict)
    for cell, own in cells.items():
        best = max(value for name, value in own.items() if name != OURS_ALL)
        for name, value in own.items():
            regrets[name][cell] = best - value
    return regrets


def show(lines: list[dict[str, Any]], *, by_rate: bool = False) -> str:
    """Returns a table in Markdown.

    Args:
        lines: The finished runs.
        by_rate: Compare the rates of each optimizer, instead of methods.
    """
    return _show_rates(lines) if by_rate else _show_methods(lines)


def _show_methods(lines: list[dict[str, Any]]) -> str:
    cells = means(lines, "method")
    regrets = _regrets(cells)
    names = sorted(regrets, key=lambda name: statistics.fmean(regrets[name].values()))
    rows = [
        "| method | cells | mean | regret | worst | against ours (95 %) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        own = regrets[name]
        worst = max(own, key=own.__getitem__)
        gaps = [cells[c][name] - cells[c][OURS] for c in own if OURS in cells[c]]
        paired = f"{statistics.fmean(gaps):+.2f} ± {interval(gaps):.2f}" if gaps else ""
        rows.append(
            f"| {name} | {len(own)} | {statistics.fmean(cells[c][name] for c in own):.2f} | "
            f"{statistics.fmean(own.values()):.2f} | {own[worst]:.2f} "
            f"({' '.join(map(str, worst))}) | {paired if name != OURS else ''} |"
        )
    rows += ["", f"| cell | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for cell, own in sorted(cells.items()):
        values = " | ".join(f"{own[name]:.2f}" if name in own else "–" for name in names)
        rows.append(f"| {' '.join(map(str, cell))} | {values} |")
    return f"{len(cells)} cells, {len(lines)} runs\n\n" + "\n".join(rows) + "\n"


def _show_rates(lines: list[dict[str, Any]]) -> str:
    rows = []
    for method in sorted({line["method"] for line in lines}):
        own = [line for line in lines if line["method"] == method]
        cells = means(own, "rate")
        for cell, rates in sorted(cells.items(), key=lambda item: (item[0][2], item[0])):
            values = ", ".join(
                f"{'rule' if rate is None else f'{rate:g}'}: {value:.2f}"
                for rate, value in sorted(
                    rates.items(), key=lambda r: (r[0] is not None, r[0] or 0)
                )
            )
            rows.append(f"| {method} | {' '.join(map(str, cell))} | {values} |")
    return "| optimizer | cell | accuracy by rate |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
