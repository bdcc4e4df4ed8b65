"""Line charts as inline SVG: axes, grid, lines, dots, markers, legend, and values on hover.

Colours come from the page's style sheet, so charts follow light and dark mode. They need no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.core.units import markup, number, text_of

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 42
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
FOOT = TOP + PLOT_HEIGHT
# The number of series colours in style.css.
SERIES_COLOURS = 8
# A line with more points than this has no dots; its values appear on hover.
_MAX_DOTS = 60
_STRIPS = 75

XY = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        name: The name in the legend and on hover; a line with an empty name has neither.
        points: The (x, y) pairs.
        colour: The number of a series colour in the style sheet, from 1.
        faint: If True, draws the line thin and behind the other lines.
        dashed: If True, draws the line dashed.
    """

    name: str
    points: Sequence[XY]
    colour: int = 1
    faint: bool = False
    dashed: bool = False

    @property
    def css_class(self) -> str:
        return f"line c{self.colour}" + " faint" * self.faint + " dashed" * self.dashed


@dataclass(frozen=True)
class Marker:
    """An event on the x axis. A `resume` is a dashed vertical line, a `skip` a notch on the axis."""

    x: float
    text: str
    kind: str = "resume"


@dataclass(frozen=True)
class Chart:
    """The contents of a line chart.

    Attributes:
        title: The caption of the figure.
        x_label: The label of the x axis.
        lines: The lines to draw.
        x_range: The ends of the x axis. The default fits the lines; one range aligns several charts.
        log: True for a logarithmic y axis.
        from_zero: True if the y axis must include zero.
        markers: Events on the x axis.
        show_value: Formats y values.
        note: A remark next to the title.
        legend: True to draw a legend. False if the page names the lines elsewhere.
        log_x: True for a logarithmic x axis.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    x_range: XY | None = None
    log: bool = False
    from_zero: bool = False
    markers: Sequence[Marker] = ()
    show_value: Callable[[float], str] = number
    note: str = ""
    legend: bool = True
    log_x: bool = False


def line_chart(chart: Chart) -> str:
    """Draws a chart as one `<svg>` element."""
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    x_axis = Axis.fit(chart.x_range or xs, tight=True, log=chart.log_x, target_ticks=6)
    y_axis = Axis.fit(ys, log=chart.log, from_zero=chart.from_zero, target_ticks=4)
    if ys:
        body = [*_frame(chart, x_axis, y_axis), *_strips(chart, x_axis), *_markers(chart, x_axis)]
        for line in sorted(chart.lines, key=lambda line: not line.faint):
            body += _line(chart, line, x_axis, y_axis)
        if chart.legend:
            body += _legend(chart)
    else:
        body = [
            f'<path class="axis" d="M{LEFT} {FOOT}h{PLOT_WIDTH}"/>'
            f'<text class="empty" x="{LEFT + PLOT_WIDTH / 2:g}" y="{TOP + PLOT_HEIGHT / 2:g}" '
            'text-anchor="middle">nothing recorded</text>'
        ]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{markup(_aria_label(chart))}">' + "".join(body) + "</svg>"
    )


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.fraction(value) * PLOT_WIDTH


def _y(axis: Axis, value: float) -> float:
    return FOOT - axis.fraction(value) * PLOT_HEIGHT


def _aria_label(chart: Chart) -> str:
    """Describes the first and last value of each line for screen readers."""
    parts = [
        f"{text_of(line.name)} from {chart.show_value(line.points[0][1])} "
        f"to {chart.show_value(line.points[-1][1])}"
        for line in chart.lines
        if line.points and not line.faint
    ]
    return f"{chart.title} by {chart.x_label}: " + ("; ".join(parts) or "nothing recorded")


def tick_text(x: float, y: float, label: str) -> str:
    """Draws a label below its tick, right-aligned at the right edge so that phones do not cut it off."""
    at_edge = x > WIDTH - RIGHT - 1 and len(label) > 2
    anchor, x = ("end", WIDTH - 1.0) if at_edge else ("middle", x)
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{label}</text>'


def _frame(chart: Chart, x_axis: Axis, y_axis: Axis) -> list[str]:
    right = LEFT + PLOT_WIDTH
    parts = []
    for tick, label in zip(y_axis.ticks, y_axis.labels(), strict=True):
        y = _y(y_axis, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(x_axis.ticks, x_axis.labels(), strict=True):
        x = _x(x_axis, tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {FOOT}v4"/>')
        parts.append(tick_text(x, FOOT + 17, label))
    parts.append(f'<path class="axis" d="M{LEFT} {FOOT}H{right}"/>')
    parts.append(
        f'<text x="{right}" y="{FOOT + 35}" text-anchor="end">{markup(chart.x_label)}</text>'
    )
    return parts


def _markers(chart: Chart, x_axis: Axis) -> list[str]:
    parts = []
    for marker in chart.markers:
        x = _x(x_axis, marker.x)
        path = f"M{x:.1f} {TOP}V{FOOT}" if marker.kind == "resume" else f"M{x:.1f} {FOOT}v-9"
        parts.append(
            f'<path class="{marker.kind}" d="{path}"><title>{markup(text_of(marker.text))}</title>'
            "</path>"
        )
    return parts


def _line(chart: Chart, line: Line, x_axis: Axis, y_axis: Axis) -> list[str]:
    if not line.points:
        return []
    places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="{line.css_class}" points="{path}"/>']
    if line.faint or len(places) > _MAX_DOTS:
        return parts
    for (x, y), (x_value, y_value) in zip(places, line.points, strict=True):
        text = f"{chart.x_label} {number(x_value)}: {line.name} {chart.show_value(y_value)}"
        parts.append(
            f'<circle class="c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{markup(text)}</title></circle>"
        )
    return parts


def _strips(chart: Chart, x_axis: Axis) -> list[str]:
    """Draws invisible vertical strips that list the values at their position on hover."""
    columns: dict[int, tuple[float, dict[str, str]]] = {}
    for line in filter(lambda line: line.name, chart.lines):
        for x, y in line.points:
            strip = min(_STRIPS - 1, max(0, int(x_axis.fraction(x) * _STRIPS)))
            _, values = columns.setdefault(strip, (x, {}))
            values[line.name] = chart.show_value(y)
    width = PLOT_WIDTH / _STRIPS
    parts = []
    for strip, (x, values) in sorted(columns.items()):
        text = "\n".join(
            [f"{chart.x_label} {number(x)}", *(f"{name} {value}" for name, value in values.items())]
        )
        parts.append(
            f'<rect class="strip" x="{LEFT + strip * width:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{PLOT_HEIGHT}"><title>{markup(text)}</title></rect>'
        )
    return parts


def _legend(chart: Chart) -> list[str]:
    """Draws the legend: the name and the last value of each line, left to right above the plot."""
    parts, x = [], float(LEFT)
    for line in chart.lines:
        if not line.points or not line.name:
            continue
        last = "" if line.faint else f" {chart.show_value(line.points[-1][1])}"
        parts.append(f'<path class="{line.css_class}" d="M{x:.1f} 14h14"/>')
        parts.append(
            f'<text class="legend" x="{x + 19:.1f}" y="18">{markup(line.name)}'
            f'<tspan class="last">{markup(last)}</tspan></text>'
        )
        # The width of text is unknown here: 6.6 units per letter is a generous estimate for the font.
        x += 19 + 6.6 * (len(line.name) + len(last)) + 16
    return parts


_BAR_WIDTH, _BAR_HEIGHT = 1000.0, 26.0


def share_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Draws a bar that shows how a whole divides into parts, as one `<svg>` element, and a legend.

    Args:
        title: A title for screen readers.
        parts: Name, fraction of the whole and style class of each part. The fractions sum to one;
            parts of zero are not drawn.
    """
    drawn, items, x = [], [], 0.0
    shown = [part for part in parts if part[1] > 0]
    for name, share, css_class in shown:
        text = f"{name} {100 * share:.1f} %"
        width = share * _BAR_WIDTH
        drawn.append(
            f'<rect class="part {css_class}" x="{x:.1f}" y="0" width="{width:.1f}" '
            f'height="{_BAR_HEIGHT:g}"><title>{markup(text)}</title></rect>'
        )
        items.append(f'<li class="{css_class}">{markup(text)}</li>')
        x += width
    label = ", ".join(f"{name} {100 * share:.0f} %" for name, share, _ in shown)
    return (
        f'<svg class="chart bar" viewBox="0 0 {_BAR_WIDTH:g} {_BAR_HEIGHT:g}" '
        f'preserveAspectRatio="none" role="img" aria-label="{markup(f"{title}: {label}")}">'
        f'{"".join(drawn)}</svg><ul class="key">{"".join(items)}</ul>'
    )


# Values with a smaller relative distance than `_SAME`, or below `_ZERO`, would need very long labels.
_SAME = 1e-4
_ZERO = 1e-100


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from `low` to `high` with ticks at round values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def fit(
        cls,
        values: Iterable[float],
        *,
        tight: bool = False,
        from_zero: bool = False,
        log: bool = False,
        target_ticks: int = 5,
    ) -> Axis:
        """Builds an axis that includes all values.

        Args:
            values: The values on the axis.
            tight: True to end the axis at the smallest and largest value instead of at ticks.
            from_zero: True to include zero.
            log: True for a logarithmic axis, if all values are positive.
            target_ticks: The approximate number of ticks.
        """
        known = list(values) or [0.0, 1.0]
        low, high = min(known), max(known)
        if log and low > 0:
            return cls._logarithmic(low, high)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        size = max(abs(low), abs(high))
        if high - low <= size * _SAME or size < _ZERO:
            margin = 0.1 * size if size >= _ZERO else 1.0
            low, high = (low - margin if size >= _ZERO else low), high + margin
        spacing = nice_spacing(low, high, target_ticks)
        if not tight:
            low = math.floor(low / spacing + 1e-9) * spacing
            high = math.ceil(high / spacing - 1e-9) * spacing
        return cls(low, high, tuple(multiples(low, high, spacing)))

    @classmethod
    def _logarithmic(cls, low: float, high: float) -> Axis:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        every = -(-(last - first) // 6)
        ticks = tuple(10.0**power for power in range(first, last + 1, every))
        return cls(10.0**first, 10.0**last, ticks, log=True)

    def fraction(self, value: float) -> float:
        """Returns the position of a value on the axis: 0 at the low end, 1 at the high end."""
        if self.log:
            span = math.log10(self.high / self.low)
            return math.log10(max(value, self.low) / self.low) / span
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """Returns the texts of the ticks, all with the same number of decimals."""
        if self.log:
            return [f"{tick:,g}" if 1e-3 <= tick < 1e4 else _power(tick) for tick in self.ticks]
        return tick_labels(self.ticks)


def nice_spacing(low: float, high: float, target_ticks: int = 5) -> float:
    """Returns 1, 2 or 5 times a power of ten that makes about `target_ticks` intervals."""
    rough = (high - low) / target_ticks
    scale = 10.0 ** math.floor(math.log10(rough))
    return min(
        (scale * factor for factor in (1.0, 2.0, 5.0, 10.0)), key=lambda s: abs(math.log(s / rough))
    )


def multiples(low: float, high: float, spacing: float) -> list[float]:
    """Returns the multiples of `spacing` from `low` to `high` without rounding errors."""
    decimals = max(0, 2 - math.floor(math.log10(spacing)))
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    # `+ 0.0` turns -0.0 into 0.0.
    return [round(n * spacing, decimals) + 0.0 for n in range(first, last + 1)]


def tick_labels(ticks: Iterable[float]) -> list[str]:
    """Formats `0, 20000, 40000` as `0, 20k, 40k` and `0, 0.5, 1` as `0.0, 0.5, 1.0`."""
    values = list(ticks)
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3 or largest >= 1e12:
        return next(
            labels
            for digits in range(2, 18)
            if len(set(labels := [_scientific(value, digits) for value in values])) == len(values)
        )
    divisor, unit = next(
        ((size, sign) for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if largest >= size),
        (1.0, ""),
    )
    if unit == "k":
        divisor = 1e3
    scaled = [value / divisor for value in values]
    decimals = next(
        (n for n in range(8) if all(abs(round(v, n) - v) < 1e-9 * max(1, abs(v)) for v in scaled)),
        8,
    )
    return ["0" if value == 0 and unit else f"{value:,.{decimals}f}{unit}" for value in scaled]


def _power(value: float) -> str:
    """Formats a tick of a logarithmic axis, as `10k` or `1M`, otherwise in scientific notation."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= value < 1e3 * size:
            return f"{value / size:g}{unit}"
    return _scientific(value)


def _scientific(value: float, digits: int = 2) -> str:
    """Formats `0.00025` as `2.5e-4`."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return "0" if value == 0 else f"{float(mantissa):.{digits + 1}g}e{int(exponent)}"
