"""The page of a comparison: the table, two charts, the settings that differ, the runs.

In: a `Comparison`. Out: one HTML page in the style of a run's report, which needs nothing beside it.
"""

from __future__ import annotations

from paceline.report.compare_charts import compare_charts, series_look
from paceline.report.compare_table import caption, compare_table, differing_table, runs_table
from paceline.report.comparison import Comparison
from paceline.report.html_document import document, figures, remarks, section
from paceline.report.quantities import many, markup

PAGE_NAME = "compare.html"


def compare_page(comparison: Comparison) -> str:
    """The whole page."""
    runs = sum(len(row.runs) for row in comparison.rows)
    title = f"Comparison of {many(runs, 'run')} in {many(len(comparison.rows), 'row')}"
    return document(
        title,
        [
            f"<header><p>{markup(caption(comparison))}</p>\n<h1>{markup(title)}</h1></header>",
            section("Result", [compare_table(comparison)]),
            _key(comparison),
            figures(compare_charts(comparison)),
            remarks("Remarks", comparison.notes),
            section("Settings that differ", [differing_table(comparison)]),
            section("Runs", [runs_table(comparison)]),
            "<footer>Paceline comparison</footer>",
        ],
    )


def _key(comparison: Comparison) -> str:
    """Which colour is which row: their names are too long for a legend in a chart."""
    items = []
    for place, row in enumerate(comparison.rows):
        colour, dashed = series_look(place)
        look = f"c{colour}" + (" dashed" if dashed else "")
        items.append(f'<li class="{look}">{markup(row.label)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'
