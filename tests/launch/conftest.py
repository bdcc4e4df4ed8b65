"""The undisturbed job that every other way to run it must equal."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cli_runs import summary
from launch.jobs import TOTAL_STEPS, assert_nothing_left, run, training


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of `paceline train --nproc-per-node 2`."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "paceline", *training(folder / "run")]
    done = run([*command, "--nproc-per-node", "2"], folder)
    assert (done.code, done.err) == (0, ""), done.out
    found = summary(folder / "run")
    assert (found["world_size"], found["steps"]) == (2, TOTAL_STEPS)
    assert_nothing_left(folder)
    return found
