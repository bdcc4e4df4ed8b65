"""One small trained run for all tests of this package that only read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from small_runs import SMALL

QUIET = SMALL | {"run.log_interval": 10_000}


def trainer(output: Path, **arguments: Any) -> pl.Trainer:
    settings = QUIET | arguments.pop("settings", {})
    return pl.Trainer(output=output, settings=settings, **arguments)


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pl.Trainer:
    made = trainer(tmp_path_factory.mktemp("api") / "run")
    made.fit()
    return made
