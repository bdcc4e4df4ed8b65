"""Makes the plots of the documentation as SVG files in docs/images, from records and from the planner.

    python tools/make_plots.py

Accuracy and speed are read from `records/*/data.jsonl`; the efficiency is a prediction of
`pl.predict_scaling`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import paceline as pl

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 128, 40, 52
COLORS = ("#0b6e99", "#c2571a", "#5b7f2b", "#8a4b9c", "#b3892b", "#6b7280")
STYLE = """
rect.page { fill: #ffffff; stroke: #d8dee4; }
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #24292f; }
.title { font-weight: 600; font-size: 15px; }
.soft { fill: #57606a; font-size: 13px; }
.grid { stroke: #e6eaee; }
"""
Point = tuple[float, float]


def rows(record: str, table: str) -> list[dict[str, str]]:
    """The rows of a table of a record."""
    lines = (ROOT / "records" / record / "data.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    result = [line["row"] for line in found if line.get("table", "").startswith(table)]
    assert result, f"records/{record} has no table {table!r}"
    return result


def number(cell: str) -> float:
    """The first number of a cell, such as 91.29 of `91.29 ± 0.02`."""
    return float(cell.split()[0].replace(",", ""))


def row_of(found: Sequence[dict[str, str]], column: str, start: str) -> dict[str, str]:
    return next(row for row in found if row.get(column, "").startswith(start))


def accuracy_against_batch() -> str:
    found = rows("alternatives", "Top-1 in %, three seeds")
    series = {}
    for name in ("Muon", "AdamW", "LARS", "LAMB", "momentum SGD"):
        row = row_of(found, "optimizer, cosine decay", name)
        points = [(math.log(b), number(row[f"{b:,}"])) for b in (256, 2500, 10_000)]
        series[name.removeprefix("momentum ")] = points
    ticks = {math.log(b): f"{b:,}" for b in (256, 2500, 10_000)}
    return lines_plot(
        "Top-1 in %, CIFAR-10, 16 epochs, one H200", "global batch", series, ticks, (50, 95, 10)
    )


def efficiency_against_nodes() -> str:
    nodes = (1, 2, 4, 8, 16, 32, 64, 128)
    cases: dict[str, dict[str, Any]] = {
        "8 × 400 Gb/s": {"node_gbps": 3200, "links": 8},
        "1 × 400 Gb/s": {"node_gbps": 400, "links": 1},
        "1 × 100 Gb/s": {"node_gbps": 100, "links": 1},
    }
    series = {}
    for name, links in cases.items():
        found = [
            pl.predict_scaling(
                "resnet50", accelerator="h100", nodes=n, gpus_per_node=8, batch_size=256, **links
            )
            for n in nodes
        ]
        series[name] = [
            (math.log2(n), 100 * f.efficiency) for n, f in zip(nodes, found, strict=True)
        ]
    ticks = {math.log2(n): str(n) for n in nodes}
    return lines_plot(
        "Predicted efficiency in %, nodes of 8 H100, not measured",
        "nodes (links per node: see labels)", series, ticks, (50, 100, 10),
    )  # fmt: skip


def speed_against_peers() -> str:
    names = {
        "plain fp16 reduce-overhead": "plain fp16, reduce-overhead",
        "plain fp16 max-autotune": "plain fp16, max-autotune",
        "plain bf16 max-autotune": "plain bf16, max-autotune",
        "ours": "Paceline, defaults",
        "ours fused by cudnn": "fused convolutions: cudnn",
    }
    lines = (ROOT / "records" / "training-step" / "data.jsonl").read_text().splitlines()
    rounds = [line["data"] for line in map(json.loads, lines) if line["record"] == "rounds"]
    bars = {
        shown: statistics.median(r["images_per_s"] for r in rounds if r["name"] == name)
        for name, shown in names.items()
    }
    return bars_plot("ResNet-50, batch 256, one H200: images/s, median of 3", bars, ours=3)


def lines_plot(
    title: str,
    axis: str,
    series: dict[str, list[Point]],
    ticks: dict[float, str],
    scale: tuple[int, int, int],
) -> str:
    """A line for each series, with its name at the end of the line."""
    low, high, step = scale
    first, last = min(ticks), max(ticks)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (right - LEFT)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    parts = [text(16, 24, title, "title")]
    for value in range(low, high + 1, step):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>')
        parts.append(text(LEFT - 8, y(value) + 5, str(value), "soft", "end"))
    for value, name in ticks.items():
        parts.append(text(x(value), bottom + 20, name, "soft", "middle"))
    parts.append(text((LEFT + right) / 2, bottom + 42, axis, "soft", "middle"))
    ends = spread([y(points[-1][1]) for points in series.values()])
    for (name, points), color, end in zip(series.items(), COLORS, ends, strict=False):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        dots = "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5"/>' for a, b in points)
        parts.append(f'<g fill="{color}">{dots}</g>')
        parts.append(text(right + 10, end + 5, name, "", color=color))
    return page(parts, HEIGHT)


def bars_plot(title: str, bars: dict[str, float], ours: int) -> str:
    """Horizontal bars; those from number `ours` on are Paceline's."""
    start, row = 196, 44
    widest = max(bars.values())
    parts = [text(16, 24, title, "title")]
    for i, (name, value) in enumerate(bars.items()):
        top = 40 + i * row
        width = value / widest * (WIDTH - start - 76)
        color = COLORS[0] if i >= ours else COLORS[-1]
        parts.append(text(start - 10, top + 21, name, "", "end"))
        parts.append(
            f'<rect x="{start}" y="{top}" width="{width:.1f}" height="30" fill="{color}"/>'
        )
        parts.append(text(start + width + 8, top + 21, f"{value:,.0f}", ""))
    return page(parts, 48 + len(bars) * row)


def spread(wanted: Sequence[float], gap: float = 17) -> list[float]:
    """Moves labels apart that would overlap."""
    placed = list(wanted)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + gap)
    return placed


def text(
    x: float, y: float, content: str, kind: str, anchor: str = "start", color: str = ""
) -> str:
    style = f' style="fill:{color}"' if color else ""
    kind = f' class="{kind}"' if kind else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{place}{style}>{escape(content)}</text>'


def page(parts: Sequence[str], height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">\n<style>{STYLE}</style>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


PLOTS = {
    "accuracy-batch.svg": accuracy_against_batch,
    "speed-peers.svg": speed_against_peers,
    "efficiency-nodes.svg": efficiency_against_nodes,
}

if __name__ == "__main__":
    for name, plot in PLOTS.items():
        (IMAGES / name).write_text(plot(), encoding="utf-8")
        print(f"wrote docs/images/{name}")
