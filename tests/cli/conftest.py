"""The command line in the test's own process, and runs that many tests compare with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cli_runs import Call, Done, is_launchers, run, run_two, small
from paceline.cli.app import run_command

Reference = Callable[..., Path]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """Calls `paceline ARGUMENTS` in `tmp_path`; for what needs no process of its own."""
    monkeypatch.chdir(tmp_path)
    for name in filter(is_launchers, list(os.environ)):
        monkeypatch.delenv(name)

    def run_here(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        capfd.readouterr()
        code = run_command()
        return Done(code, *capfd.readouterr())

    return run_here


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`reference("-b", "4", ranks=2)`: the folder of an undisturbed run, which takes place once."""

    @cache
    def folder_of(*more: str, ranks: int = 1) -> Path:
        cwd, arguments = tmp_path_factory.mktemp("reference"), small("--output", "run", *more)
        done = [run(arguments, cwd)] if ranks == 1 else run_two(arguments, cwd)
        assert [rank.code for rank in done] == [0] * ranks, done[0].err
        return cwd / "run"

    return folder_of
