"""The command line, called in the test's own process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cli_runs import Call, Done, is_launchers
from paceline.cli import app


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """Calls `paceline ARGUMENTS` in `tmp_path`: what fails at once needs no process of its own."""
    monkeypatch.chdir(tmp_path)
    for name in filter(is_launchers, list(os.environ)):
        monkeypatch.delenv(name)

    def run_here(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = app._run()
        return Done(code, *capfd.readouterr())

    return run_here
