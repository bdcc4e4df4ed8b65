"""The parts that all pages share: document, sections, tables, charts.

A page is one HTML document with its style and charts inline. A page in a file has no script and loads
nothing. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from paceline.core.units import markup
from paceline.report.chart import Chart, line_chart
from paceline.report.tables import Table

# Pixels inside of a card on a phone.
_PHONE_WIDTH = 340


def document(title: str, parts: Iterable[str], script: str = "") -> str:
    """The whole page; `parts` are markup, and empty ones are left out. Only live pages have a `script`,
    the address of one."""
    loaded = f'<script src="{markup(script)}" defer></script>\n' if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(title)}</title>\n<style>{style()}</style>\n{loaded}</head>\n<body>\n<main>\n"
        + joined(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def joined(parts: Iterable[str]) -> str:
    """The content of a page, without the empty parts."""
    return "\n".join(part for part in parts if part)


@cache
def style() -> str:
    """The style sheet of all pages."""
    return Path(__file__).with_name("style.css").read_text("utf-8")


def figures(charts: Iterable[Chart]) -> str:
    drawn = "\n".join(
        f"<figure><figcaption>{markup(chart.title)} <span>{markup(chart.note)}</span>"
        f"</figcaption>{line_chart(chart)}</figure>"
        for chart in charts
    )
    return f'<section class="charts">\n{drawn}\n</section>'


def section(title: str, tables: Sequence[Table], *, titled: bool = False) -> str:
    """A heading and a card for each table that has rows; without any, nothing."""
    cards = _cards(tables, titled=titled)
    if not cards:
        return ""
    return f'<section><h2>{markup(title)}</h2>\n<div class="wide">{cards}</div></section>'


def card_section(title: str, tables: Sequence[Table], otherwise: str) -> str:
    """A heading and small tables side by side, or the sentence `otherwise`."""
    cards = _cards(tables, titled=True)
    body = (
        f'<div class="cards">{cards}</div>' if cards else f'<p class="note">{markup(otherwise)}</p>'
    )
    return f"<section><h2>{markup(title)}</h2>\n{body}</section>"


def list_section(title: str, lines: Iterable[str]) -> str:
    """A heading and a list; nothing where there is no line."""
    items = "".join(f"<li>{markup(text)}</li>" for text in lines)
    if not items:
        return ""
    return f'<section><h2>{markup(title)}</h2>\n<ul class="card notes">{items}</ul></section>'


def folded(summary: str, body: str) -> str:
    """What is shown on demand."""
    return f"<details><summary>{markup(summary)}</summary>\n{body}</details>" if body else ""


def definition_list(rows: Iterable[tuple[str, str]], css_class: str) -> str:
    pairs = "".join(
        f"<div><dt>{markup(label)}</dt><dd>{markup(value)}</dd></div>" for label, value in rows
    )
    return f'<dl class="{css_class}">{pairs}</dl>' if pairs else ""


def link_to(path: str) -> str:
    """A relative address: whatever the names in it, it neither leaves this place nor names a protocol."""
    return f"./{quote(path)}"


def _linked(cell: str, link: str) -> str:
    return f'<a href="{markup(link)}">{markup(cell)}</a>' if link else markup(cell)


def _cards(tables: Iterable[Table], *, titled: bool) -> str:
    return "\n".join(
        f'<div class="card">{_table(table, titled=titled)}</div>' for table in tables if table.rows
    )


def _table(table: Table, *, titled: bool) -> str:
    """A table that scrolls sideways on a narrow screen instead of widening the page."""
    css = [' class="text"' * (n in table.text_columns) for n in range(len(table.columns))]

    def row(tag: str, cells: Iterable[str], attributes: str = "", link: str = "") -> str:
        filled = (
            f"<{tag}{attributes}{css_class}>"
            f"{_linked(cell, link if n == table.link_column else '')}</{tag}>"
            for n, (css_class, cell) in enumerate(zip(css, cells, strict=True))
        )
        return f"<tr>{''.join(filled)}</tr>"

    caption = f"<caption>{markup(table.title)}</caption>" if titled else ""
    head = row("th", table.columns, ' scope="col"') if any(table.columns) else ""
    links = table.links or ("",) * len(table.rows)
    body = "".join(
        row("td", cells, link=link) for cells, link in zip(table.rows, links, strict=False)
    )
    note = f'<p class="note">{markup(table.note)}</p>' if table.note else ""
    drawn = f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"
    return scrolled(drawn, _width(table)) + note


def _width(table: Table) -> float:
    """About the least width in pixels: columns of text wrap, those of numbers do not."""
    width = 0.0
    for n, (head, *cells) in enumerate(zip(table.columns, *table.rows, strict=True)):
        longest = max(6.6 * len(head), *(7.8 * len(cell) for cell in cells))
        width += 10 + (min(longest, 105.0) if n in table.text_columns else longest)
    return width


def scrolled(content: str, width: float) -> str:
    """What scrolls sideways on a narrow screen; there a hint says so if `width` is larger."""
    hint = '<p class="hint">more to the right: scroll →</p>' if width > _PHONE_WIDTH else ""
    return f'{hint}<div class="scroll">{content}</div>'
