"""The report of a run: one HTML page that needs nothing beside it.

In: a `RunFiles`. Out: the page as text, with its style and charts inline, no script, nothing to
load, every name escaped. An unfinished run gives a page of what there is.
"""

from __future__ import annotations

import re

from paceline.report import incident_tables, tables
from paceline.report.expectation import expectation_table
from paceline.report.html_document import document, figures, remarks, section
from paceline.report.html_table import html_pairs, html_table
from paceline.report.input_stall import stall_table
from paceline.report.outcome import Outcome
from paceline.report.quantities import markup, moment, shown
from paceline.report.run_charts import run_charts
from paceline.report.run_files import RunFiles, finite
from paceline.report.tables import Table
from paceline.report.text_summary import verdict

# What a reader came for; the other figures stand below in small.
_LARGE = ("top-1", "top-5", "images/s", "training time", "time to target")

# A line must not break between a number and its unit.
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:%|s|min|h|images/s|ranks?)(?!\w))")


def render(run: RunFiles) -> str:
    """The whole page."""
    return document(verdict(run), _parts(run))


def _parts(run: RunFiles) -> list[str]:
    results = tables.result_rows(run)
    return [
        _header(run),
        html_pairs([row for row in results if row[0] in _LARGE], "tiles"),
        html_pairs([row for row in results if row[0] not in _LARGE], "facts"),
        figures(run_charts(run)),
        section("Predicted and measured", [expectation_table(run)]),
        section("Waiting for the input", [stall_table(run)]),
        section("Evaluations", [tables.epoch_table(run)]),
        section(
            "Incidents",
            [
                incident_tables.resume_table(run),
                incident_tables.skipped_table(run),
                incident_tables.corrupt_table(run),
            ],
            titled=True,
        ),
        remarks("Remarks", incident_tables.notes(run)[: tables.MAX_ROWS]),
        section(
            "Files and ranks",
            [incident_tables.checkpoint_table(run), incident_tables.rank_table(run)],
            titled=True,
        ),
        _cards("Configuration", tables.configuration_tables(run), "config.toml is not there"),
        _cards("Environment", tables.environment_tables(run), "known once the run has ended"),
        _footer(run),
    ]


def _header(run: RunFiles) -> str:
    outcome = Outcome.of(run)
    starts = run.of_kind("start")
    began = moment(finite(starts[0], "time")) if starts else "not started"
    model = (run.summary or {}).get("model")
    facts = [shown(run.path.resolve().name), began, *([shown(model)] if model else [])]
    title = _UNIT_GAP.sub("&nbsp;", markup(verdict(run)))
    return (
        f'<header><p><span class="state {outcome.state}">{outcome.state}</span>'
        f"{markup(' · '.join(facts))}</p>\n<h1>{title}</h1></header>"
    )


def _cards(title: str, content: list[Table], otherwise: str) -> str:
    """Small tables side by side."""
    filled = [f'<div class="card">{html_table(table)}</div>' for table in content if table.rows]
    body = f'<p class="note">{markup(otherwise)}</p>'
    if filled:
        body = '<div class="cards">' + "\n".join(filled) + "</div>"
    return f"<section><h2>{markup(title)}</h2>\n{body}</section>"


def _footer(run: RunFiles) -> str:
    digest = (run.summary or {}).get("weights_sha256")
    weights = f" · weights sha256 {markup(shown(digest))}" if digest else ""
    averaged = (run.summary or {}).get("average_sha256")
    average = f" · their average {markup(shown(averaged))}" if averaged else ""
    return f"<footer>Paceline run report{weights}{average}</footer>"
