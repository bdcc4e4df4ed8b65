"""The frame that every page shares: head, style, sections, charts.

In: a title and parts that are markup already. Out: one HTML document that needs nothing beside it:
no script, nothing to load; titles and notes are escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.report.chart import Chart, line_chart
from paceline.report.quantities import markup
from paceline.report.tables import Table


def document(title: str, parts: Iterable[str]) -> str:
    """The whole page; parts that are empty leave no trace."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def figures(charts: Iterable[Chart]) -> str:
    """Charts side by side, each under its title."""
    drawn = "\n".join(
        f"<figure><figcaption>{markup(chart.title)} <span>{markup(chart.note)}</span>"
        f"</figcaption>{line_chart(chart)}</figure>"
        for chart in charts
    )
    return f'<section class="charts">\n{drawn}\n</section>'


def section(title: str, content: Sequence[Table], *, titled: bool = False) -> str:
    """A heading and a card for each table; nothing where all are empty."""
    filled = [html_table(table, titled=titled) for table in content if table.rows]
    if not filled:
        return ""
    cards = "\n".join(f'<div class="card">{table}</div>' for table in filled)
    return f'<section><h2>{markup(title)}</h2>\n<div class="wide">{cards}</div></section>'


def remarks(title: str, lines: Iterable[str]) -> str:
    """A heading and a list; nothing where there is no line."""
    items = "".join(f"<li>{markup(text)}</li>" for text in lines)
    if not items:
        return ""
    return f'<section><h2>{markup(title)}</h2>\n<ul class="card remarks">{items}</ul></section>'


# Tables as HTML.
#
# In: a `Table`, or rows of (label, value). Out: escaped markup; an empty table gives no markup.


def html_table(table: Table, *, titled: bool = True) -> str:
    """A table that scrolls sideways on a narrow screen instead of widening the page."""
    if not table.rows:
        return ""
    caption = f"<caption>{markup(table.title)}</caption>" if titled else ""
    head = ""
    if any(table.columns):
        cells = "".join(
            f'<th scope="col"{_look(table, place)}>{markup(name)}</th>'
            for place, name in enumerate(table.columns)
        )
        head = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(
        "<tr>"
        + "".join(f"<td{_look(table, place)}>{markup(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{markup(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table>{caption}{head}<tbody>{body}</tbody></table></div>{note}'


def html_pairs(rows: Iterable[tuple[str, str]], look: str) -> str:
    """Labels and values as a definition list of the style class `look`."""
    pairs = "".join(
        f"<div><dt>{markup(label)}</dt><dd>{markup(value)}</dd></div>" for label, value in rows
    )
    return f'<dl class="{look}">{pairs}</dl>' if pairs else ""


def _look(table: Table, place: int) -> str:
    return ' class="text"' if place in table.text_columns else ""


# The report's style sheet: one constant, set inline, so that the page needs no second file.


# How many series colours there are; a chart of more lines dashes the next round of them.
SERIES_COLOURS = 8
_SERIES = "\n".join(
    f".chart .line.c{n} {{ stroke: var(--c{n}); }} .chart circle.c{n} {{ fill: var(--c{n}); }} "
    f".key .c{n}::before {{ border-color: var(--c{n}); }}"
    for n in range(1, SERIES_COLOURS + 1)
)

STYLE = (
    """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #5b6877; --rule: #dfe4ea;
  --grid: #e9edf1; --c1: #1f6fd1; --c2: #d9730d; --good: #1a7f4b; --warn: #a15c07;
  --c3: #2a8f57; --c4: #b5359c; --c5: #7a5cd6; --c6: #8a6d1f; --c7: #0f8f9c; --c8: #c62f3b;
  --good-back: #e3f4ea; --warn-back: #fdf0dc; --alarm: #c62f3b; --strip: rgba(31, 111, 209, .09);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10151c; --card: #18202a; --ink: #e6ebf1; --soft: #94a1b1; --rule: #2b3644;
    --grid: #242e3a; --c1: #5ba7ff; --c2: #ffab57; --good: #63d297; --warn: #f2b95f;
    --c3: #63d297; --c4: #f58ae0; --c5: #b09cff; --c6: #d9bd6a; --c7: #54d0dc; --c8: #ff7b84;
    --good-back: #173526; --warn-back: #3a2c14; --alarm: #ff7b84; --strip: rgba(91, 167, 255, .13);
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 56px; }
header p { margin: 0; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
h1 { margin: 6px 0 0; font-size: 27px; line-height: 1.25; letter-spacing: -.015em;
  text-wrap: balance; overflow-wrap: anywhere; }
h2 { margin: 40px 0 12px; font-size: 18px; letter-spacing: -.01em; }
.state { display: inline-block; margin-right: 10px; padding: 1px 10px; border-radius: 99px;
  font-weight: 600; color: var(--warn); background: var(--warn-back); }
.state.finished { color: var(--good); background: var(--good-back); }
.tiles { display: grid; gap: 12px; margin: 24px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(min(180px, 45%), 1fr)); }
.tiles div, figure, .card { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.tiles div { padding: 11px 14px 12px; }
.tiles dt { color: var(--soft); font-size: 12.5px; }
.tiles dd { margin: 1px 0 0; font-size: 25px; font-weight: 600; letter-spacing: -.01em;
  overflow-wrap: anywhere; line-height: 1.3; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 26px; margin: 16px 2px 20px; }
.facts div { display: flex; gap: 7px; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; gap: 14px; margin-top: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
figure { margin: 0; padding: 14px 14px 8px; }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-weight: 600;
  margin: 0 2px 6px; }
figcaption span { color: var(--soft); font-weight: 400; font-size: 12.5px; }
.chart { display: block; width: 100%; height: auto; }
.chart text { fill: var(--soft); font-size: 12px; }
.chart .legend { fill: var(--ink); }
.chart .last { font-weight: 600; }
.chart .empty { font-size: 14px; }
.chart path { fill: none; }
.chart .grid { stroke: var(--grid); }
.chart .axis { stroke: var(--soft); stroke-opacity: .55; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .line.faint { stroke-width: 1; stroke-opacity: .42; }
.chart .line.dashed { stroke-dasharray: 6 5; }
.chart circle { stroke: var(--card); stroke-width: 1.2; }
.chart circle:hover { stroke: var(--ink); stroke-width: 2; }
.key { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 24px 2px 0; padding: 0;
  list-style: none; overflow-wrap: anywhere; }
.key li::before { content: ""; display: inline-block; width: 18px; margin-right: 8px;
  border-top: 3px solid; vertical-align: middle; }
.key .dashed::before { border-top-style: dashed; }
.chart .resume { stroke: var(--soft); stroke-dasharray: 3 4; }
.chart .skip { stroke: var(--alarm); stroke-width: 2; }
.chart .strip { fill: transparent; }
.chart .strip:hover { fill: var(--strip); }
.cards { columns: 320px 3; column-gap: 14px; }
.cards .card { break-inside: avoid; margin-bottom: 14px; }
.wide { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.wide > :last-child:nth-child(odd) { grid-column: 1 / -1; }
.card { padding: 4px 14px 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 8px 0 6px; }
th { color: var(--soft); font-weight: 500; font-size: 12.5px; }
th, td { padding: 6px 16px 6px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover td { background: var(--strip); }
.cards td:first-child { color: var(--soft); white-space: nowrap; overflow-wrap: normal; }
.cards td:last-child { width: 55%; }
.note { color: var(--soft); font-size: 13px; margin: 6px 0; }
.remarks { margin: 0; padding: 10px 14px 10px 34px; }
footer { margin-top: 44px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
@media print { body { background: none; } figure, .card, tr { break-inside: avoid; } }
"""
    + _SERIES
    + "\n"
)
