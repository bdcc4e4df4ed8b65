"""The frame that every page shares: head, style, sections, charts.

In: a title and parts that are markup already. Out: one HTML document that needs nothing beside it:
no script, nothing to load; titles and notes are escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.report.html_table import html_table
from paceline.report.page_style import STYLE
from paceline.report.quantities import markup
from paceline.report.svg_chart import Chart, line_chart
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
