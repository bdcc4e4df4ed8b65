"""Run folders as tables, charts and HTML pages; comparisons. Starts without torch."""

from paceline.report.bottleneck import bound_by
from paceline.report.compare_page import (
    compare_caption,
    compare_json,
    compare_markdown,
    compare_table,
    render_comparison,
)
from paceline.report.compare_runs import ComparedRun, CompareError, read_runs
from paceline.report.comparison import Comparison
from paceline.report.html import chart_document, range_page
from paceline.report.outcome import Efficiency, Outcome, verdict
from paceline.report.run_files import RunFiles
from paceline.report.run_page import render_run, summary_rows, write_page, write_report
from paceline.report.tables import Table

__all__ = [
    "CompareError",
    "ComparedRun",
    "Comparison",
    "Efficiency",
    "Outcome",
    "RunFiles",
    "Table",
    "bound_by",
    "chart_document",
    "compare_caption",
    "compare_json",
    "compare_markdown",
    "compare_table",
    "range_page",
    "read_runs",
    "render_comparison",
    "render_run",
    "summary_rows",
    "verdict",
    "write_page",
    "write_report",
]
