"""Tables, charts and HTML pages of run folders, without torch.

The package exports the functions that `paceline train` calls at its end. Commands import the
modules for comparisons (`compare_page`, `comparison`, `compare_runs`) and live pages (`server`,
`live_run`) directly.
"""

from paceline.report.bottleneck import bound_by
from paceline.report.outcome import Efficiency, Outcome, verdict
from paceline.report.run_files import RunFiles
from paceline.report.run_page import render_run, summary_rows, write_page, write_report
from paceline.report.tables import Table

__all__ = [
    "Efficiency",
    "Outcome",
    "RunFiles",
    "Table",
    "bound_by",
    "render_run",
    "summary_rows",
    "verdict",
    "write_page",
    "write_report",
]
