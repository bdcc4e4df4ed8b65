"""Builds the HTML parts that all pages share: document, sections, tables and figures.

A page is one HTML document with inline style and charts. A page that is written to a file has no script
and loads nothing. The functions of this module escape all text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from paceline.core.units import markup
from paceline.report.chart import Chart, line_chart
from paceline.report.tables import Table


def document(title: str, parts: Iterable[str], script: str = "") -> str:
    """Builds a complete HTML page.

    Args:
        title: The title of the page, as plain text.
        parts: HTML markup of the body; empty parts are left out.
        script: The address of a script, for live pages only.
    """
    loaded = f'<script src="{markup(script)}" defer></script>\n' if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(title)}</title>\n<style>{style()}</style>\n{loaded}</head>\n<body>\n<main>\n"
        + joined(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def joined(parts: Iterable[str]) -> str:
    """Joins the parts of a page that are not empty."""
    return "\n".join(part for part in parts if part)


@cache
def style() -> str:
    """Returns the style sheet of all pages."""
    return Path(__file__).with_name("style.css").read_text("utf-8")


def figures(charts: Iterable[Chart]) -> str:
    """Builds a section of charts with captions."""
    drawn = "\n".join(
        f"<figure><figcaption>{markup(chart.title)} <span>{markup(chart.note)}</span>"
        f"</figcaption>{line_chart(chart)}</figure>"
        for chart in charts
    )
    return f'<section class="charts">\n{drawn}\n</section>'


def section(title: str, tables: Sequence[Table], *, titled: bool = False) -> str:
    """Builds a heading and a card for each table that has rows; returns "" if no table has rows.

    Args:
        title: The heading of the section.
        tables: The tables to show.
        titled: True if each card shows the title of the table.
    """
    cards = _cards(tables, titled=titled)
    if not cards:
        return ""
    return f'<section><h2>{markup(title)}</h2>\n<div class="wide">{cards}</div></section>'


def card_section(title: str, tables: Sequence[Table], otherwise: str) -> str:
    """Builds a heading and small tables side by side, or `otherwise` if no table has rows."""
    cards = _cards(tables, titled=True)
    body = (
        f'<div class="cards">{cards}</div>' if cards else f'<p class="note">{markup(otherwise)}</p>'
    )
    return f"<section><h2>{markup(title)}</h2>\n{body}</section>"


def list_section(title: str, lines: Iterable[str]) -> str:
    """Builds a heading and a bulleted list; returns "" if there are no lines."""
    items = "".join(f"<li>{markup(text)}</li>" for text in lines)
    if not items:
        return ""
    return f'<section><h2>{markup(title)}</h2>\n<ul class="card notes">{items}</ul></section>'


def definition_list(rows: Iterable[tuple[str, str]], css_class: str) -> str:
    """Builds a list of (label, value) pairs; returns "" if there are no rows."""
    pairs = "".join(
        f"<div><dt>{markup(label)}</dt><dd>{markup(value)}</dd></div>" for label, value in rows
    )
    return f'<dl class="{css_class}">{pairs}</dl>' if pairs else ""


def _cards(tables: Iterable[Table], *, titled: bool) -> str:
    return "\n".join(
        f'<div class="card">{_table(table, titled=titled)}</div>' for table in tables if table.rows
    )


def _table(table: Table, *, titled: bool) -> str:
    """Builds a table that scrolls sideways on a narrow screen instead of widening the page."""
    css = [' class="text"' * (n in table.text_columns) for n in range(len(table.columns))]

    def row(tag: str, cells: Iterable[str], attributes: str = "") -> str:
        filled = (
            f"<{tag}{attributes}{css_class}>{markup(cell)}</{tag}>"
            for css_class, cell in zip(css, cells, strict=True)
        )
        return f"<tr>{''.join(filled)}</tr>"

    caption = f"<caption>{markup(table.title)}</caption>" if titled else ""
    head = row("th", table.columns, ' scope="col"') if any(table.columns) else ""
    body = "".join(row("td", cells) for cells in table.rows)
    note = f'<p class="note">{markup(table.note)}</p>' if table.note else ""
    drawn = f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{drawn}</div>{note}'
