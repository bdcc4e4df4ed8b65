from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from small_runs import run_small
from train.runs import EVERY_STEP


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 7 steps with a checkpoint of each; tests must not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_small(folder, **EVERY_STEP)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))
