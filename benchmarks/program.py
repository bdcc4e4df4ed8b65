"""Helpers of the programs: start, ranks, and results as a table or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from paceline.cli.measure import environment, print_json
from paceline.core.errors import LaunchError, PacelineError
from paceline.core.topology import Topology
from paceline.tune.timing import RankGroup


def run(main: Callable[..., None]) -> NoReturn:
    """Runs `main` with the flags of the command line; an error that a user can cause is one line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    try:
        app()
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {error}\n")
        sys.exit(error.exit_code)
    raise AssertionError("typer ends the process")


def check_launched() -> None:
    """Raises LaunchError if no launcher has started this process as a rank."""
    if Topology.from_env(os.environ).launcher == "single":
        raise LaunchError(
            "no ranks to measure between", "start it with torchrun, or with benchmarks.cluster"
        )


def show_ranks(
    joined: RankGroup, report: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], str]
) -> None:
    """Shows the report of rank 0, with the cluster and the environment."""
    report = {**report, "cluster": joined.describe(), **environment(joined.device)}
    if joined.rank == 0 and as_json:
        print_json(report)
    elif joined.rank == 0:
        sys.stdout.write(table(report))
