"""Tables as HTML.

In: a `Table`, or rows of (label, value). Out: escaped markup; an empty table gives no markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.report.quantities import markup
from paceline.report.tables import Table


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
