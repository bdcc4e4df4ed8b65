"""A line chart as inline SVG: axes, grid, lines, dots, markers, legend, and values on hover.

In: a `Chart`. Out: one `<svg>` element. Colours come from the page's CSS variables, so the chart
follows light and dark; it needs no script and loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.report.axis import Axis
from paceline.report.quantities import markup, number, shown

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 42
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
# A line of fewer points gets a dot on each; a denser one is read through the hover strips.
_MAX_DOTS = 60
_STRIPS = 75

XY = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One series. `colour` counts the page's series colours from 1; `faint` lies in the back.

    One without a name is drawn, and told of neither in the legend nor on hover.
    """

    name: str
    points: Sequence[XY]
    colour: int = 1
    faint: bool = False
    dashed: bool = False

    @property
    def look(self) -> str:
        """Its classes in the page's style."""
        shades = " faint" * self.faint + " dashed" * self.dashed
        return f"line c{self.colour}{shades}"


@dataclass(frozen=True)
class Marker:
    """A moment on the x axis: `resume` as a dashed rule, `skip` as a notch at the foot."""

    x: float
    text: str
    kind: str = "resume"


@dataclass(frozen=True)
class Chart:
    """What to draw. `x_range` keeps charts of one run aligned with one another.

    `legend` off: the page names the lines elsewhere.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    x_range: XY | None = None
    log: bool = False
    from_zero: bool = False
    markers: Sequence[Marker] = ()
    show_value: Callable[[float], str] = field(default=number)
    note: str = ""
    legend: bool = True


def line_chart(chart: Chart) -> str:
    """The chart as SVG; without any point, a frame that says so."""
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    x_axis = Axis.fit(chart.x_range or xs, tight=True, target_ticks=6)
    y_axis = Axis.fit(ys, log=chart.log, from_zero=chart.from_zero, target_ticks=4)
    body = []
    if ys:
        body += _frame(chart, x_axis, y_axis)
        body += _strips(chart, x_axis)
        body += _markers(chart, x_axis)
        for line in sorted(chart.lines, key=lambda line: not line.faint):
            body += _line(chart, line, x_axis, y_axis)
        if chart.legend:
            body += _legend(chart)
    else:
        body.append(
            f'<path class="axis" d="M{LEFT} {TOP + PLOT_HEIGHT}h{PLOT_WIDTH}"/>'
            f'<text class="empty" x="{LEFT + PLOT_WIDTH / 2:g}" y="{TOP + PLOT_HEIGHT / 2:g}" '
            'text-anchor="middle">nothing recorded</text>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{markup(_spoken(chart))}">' + "".join(body) + "</svg>"
    )


def place(x: float, y: float, x_axis: Axis, y_axis: Axis) -> XY:
    """The position of a value in the SVG's own units, y downwards."""
    return LEFT + x_axis.share(x) * PLOT_WIDTH, TOP + (1 - y_axis.share(y)) * PLOT_HEIGHT


def _spoken(chart: Chart) -> str:
    """The chart in words: each line's first and last value."""
    parts = [
        f"{shown(line.name)} from {chart.show_value(line.points[0][1])} "
        f"to {chart.show_value(line.points[-1][1])}"
        for line in chart.lines
        if line.points and not line.faint
    ]
    return f"{chart.title} by {chart.x_label}: " + ("; ".join(parts) or "nothing recorded")


def _frame(chart: Chart, x_axis: Axis, y_axis: Axis) -> list[str]:
    right, foot = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    parts = []
    for tick, label in zip(y_axis.ticks, y_axis.labels(), strict=True):
        y = TOP + (1 - y_axis.share(tick)) * PLOT_HEIGHT
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(x_axis.ticks, x_axis.labels(), strict=True):
        x = LEFT + x_axis.share(tick) * PLOT_WIDTH
        parts.append(f'<path class="axis" d="M{x:.1f} {foot}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {foot}H{right}"/>')
    parts.append(
        f'<text x="{right}" y="{foot + 35}" text-anchor="end">{markup(chart.x_label)}</text>'
    )
    return parts


def _markers(chart: Chart, x_axis: Axis) -> list[str]:
    foot = TOP + PLOT_HEIGHT
    parts = []
    for marker in chart.markers:
        x = LEFT + x_axis.share(marker.x) * PLOT_WIDTH
        path = f"M{x:.1f} {TOP}V{foot}" if marker.kind == "resume" else f"M{x:.1f} {foot}v-9"
        parts.append(
            f'<path class="{marker.kind}" d="{path}"><title>{markup(shown(marker.text))}</title>'
            "</path>"
        )
    return parts


def _line(chart: Chart, line: Line, x_axis: Axis, y_axis: Axis) -> list[str]:
    if not line.points:
        return []
    places = [place(x, y, x_axis, y_axis) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="{line.look}" points="{path}"/>']
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
    """Invisible columns over the plot, each with the values that lie in it as its title."""
    found: dict[int, tuple[float, dict[str, str]]] = {}
    for line in filter(lambda line: line.name, chart.lines):
        for x, y in line.points:
            strip = min(_STRIPS - 1, max(0, int(x_axis.share(x) * _STRIPS)))
            _, values = found.setdefault(strip, (x, {}))
            values[line.name] = chart.show_value(y)
    width = PLOT_WIDTH / _STRIPS
    parts = []
    for strip, (x, values) in sorted(found.items()):
        text = "\n".join(
            [f"{chart.x_label} {number(x)}", *(f"{name} {value}" for name, value in values.items())]
        )
        parts.append(
            f'<rect class="strip" x="{LEFT + strip * width:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{PLOT_HEIGHT}"><title>{markup(text)}</title></rect>'
        )
    return parts


def _legend(chart: Chart) -> list[str]:
    """Name and last value of each line, from left to right above the plot."""
    parts, x = [], float(LEFT)
    for line in chart.lines:
        if not line.points or not line.name:
            continue
        last = "" if line.faint else f" {chart.show_value(line.points[-1][1])}"
        parts.append(f'<path class="{line.look}" d="M{x:.1f} 14h14"/>')
        parts.append(
            f'<text class="legend" x="{x + 19:.1f}" y="18">{markup(line.name)}'
            f'<tspan class="last">{markup(last)}</tspan></text>'
        )
        # No text can be measured here: 6.6 units a letter is on the wide side of the font used.
        x += 19 + 6.6 * (len(line.name) + len(last)) + 16
    return parts
