"""Gantt charts as inline SVG: bars in named rows over a time axis, for the page of `paceline plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.units import markup
from paceline.report.chart import RIGHT, WIDTH, Axis, tick_text


@dataclass(frozen=True)
class Bar:
    """Of a Gantt chart, from `start` to `end`, in row `row`; `text` shows on hover."""

    row: str
    start: float
    end: float
    text: str
    colour: int = 1


# Rows of a Gantt chart: their height, and the width of their names.
_ROW, _NAMES = 26, 92


def gantt_chart(label: str, unit: str, bars: Sequence[Bar]) -> str:
    """One `<svg>` element, a row for each name in the order of the bars, time to the right."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    axis = Axis.fit([0.0, *(bar.end for bar in bars)], tight=True, target_ticks=5)
    foot, width = 8 + _ROW * len(rows), WIDTH - _NAMES - RIGHT

    def x(value: float) -> float:
        return _NAMES + axis.share(value) * width

    parts = []
    for tick, text in zip(axis.ticks, axis.labels(), strict=True):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 4V{foot}"/>')
        parts.append(tick_text(x(tick), foot + 17, text))
    for place, name in enumerate(rows):
        y = 8 + _ROW * place
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 15}" text-anchor="end">{markup(name)}</text>')
    for bar in bars:
        y = 8 + _ROW * rows.index(bar.row)
        # A bar too short to see is one unit wide.
        wide = max(1.0, x(bar.end) - x(bar.start))
        parts.append(
            f'<rect class="bar c{bar.colour}" x="{x(bar.start):.1f}" y="{y}" width="{wide:.1f}" '
            f'height="{_ROW - 6}"><title>{markup(bar.text)}</title></rect>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{foot + 33}" text-anchor="end">{markup(unit)}</text>'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {foot + 38}" role="img" '
        f'aria-label="{markup(label)}">' + "".join(parts) + "</svg>"
    )
