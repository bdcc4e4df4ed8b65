"""`paceline watch`: live reports of runs in a browser. Needs no torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console

from paceline.core.errors import ConfigError, DataError
from paceline.report.live_run import run_folders
from paceline.report.server import (
    LOOPBACK,
    MOST_RUNS,
    PORT,
    WatchServer,
    is_loopback,
    open_socket,
)
from paceline.train.display import print_line

TOKEN_VARIABLE = "PACELINE_WATCH_TOKEN"
_SHORTEST_TOKEN = 12


def watch_runs(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run folders, or folders of run folders; they need not exist yet."
    ),
    port: int = typer.Option(PORT, help="Port to listen on; 0 finds a free one.", metavar="N"),
    host: str = typer.Option(
        LOOPBACK, help=f"Address to listen on. Others than loopback need the token, from "
        f"{TOKEN_VARIABLE} or made up and printed.",
    ),
) -> int:  # fmt: skip
    """Serve live reports of runs, finished or not, and their metrics for Prometheus."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise ConfigError(
            TOKEN_VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} letters and digits",
            "leave it out, and a token is made up",
        )  # fmt: skip
    if not is_loopback(host) and not token:
        token = secrets.token_hex(16)
    found = find_runs(runs)
    with WatchServer(runs, open_socket(host, port), token) as server:
        names = ", ".join(path.name for path in found[:5]) + (", …" if len(found) > 5 else "")
        print_line(Console(), f"watching {names} at {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def find_runs(given: Iterable[Path]) -> list[Path]:
    """The run folders that are there now, and folders that are waited for. The server looks again."""
    given = list(given)
    for path in given:
        if path.exists() and not path.is_dir():
            raise DataError(f"{path} is not a folder", "give a run folder")
    found = run_folders(given)
    if len(found) > MOST_RUNS:
        raise ConfigError("RUN", len(found), f"are more than {MOST_RUNS} runs", "name some of them")
    return found
