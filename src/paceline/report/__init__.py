"""Reads a run's event files; makes tables, charts and one HTML page. Standard library only."""

from paceline.report.html_page import render
from paceline.report.run_files import RunFiles
from paceline.report.text_summary import summary_rows, verdict
from paceline.report.write import write_report

__all__ = ["RunFiles", "render", "summary_rows", "verdict", "write_report"]
