"""Reads a run's event files; makes tables, charts and one HTML page. Standard library only."""

from paceline.report.run_files import RunFiles
from paceline.report.run_page import render, summary_rows, verdict, write_report

__all__ = ["RunFiles", "render", "summary_rows", "verdict", "write_report"]
