"""Which configuration flags give, the command line of ranks, and the quickstart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import is_launchers, summary
from paceline.cli.measure import is_rank
from paceline.cli.options import without_options
from paceline.cli.train import resolve
from refusals import refused


def test_recipe_and_data() -> None:
    quickstart = resolve(None, {}, [])
    assert (quickstart.run.name, quickstart.data.source) == ("quickstart", "embedded")
    own = resolve(None, {"data.dir": "/data"}, [])
    assert (own.run.name, own.model.name, own.data.image_size) == ("run", "resnet50", 224)
    both = resolve("quickstart", {"data.dir": "/data"}, [])
    assert (both.data.source, both.data.dir, both.model.name) == ("auto", "/data", "resnet_tiny")
    assigned = resolve("quickstart", {"run.seed": 1}, ["run.seed=2", "data.mean=[0.5]"])
    assert (assigned.run.seed, assigned.data.mean) == (2, (0.5,))


def test_ranks_get_the_command_line_without_the_options_that_start_them() -> None:
    given = ["train", "--ranks", "2", "-b", "8", "--nproc-per-node=3", "q", "--epochs", "1"]
    assert without_options(given, ("--ranks", "--nproc-per-node")) == [
        "train", "-b", "8", "q", "--epochs", "1"
    ]  # fmt: skip


def test_a_rank_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(is_launchers, list(os.environ)):
        monkeypatch.delenv(name)
    assert not is_rank(2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert is_rank(0)
    with refused("--nproc-per-node"):
        is_rank(2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstart_reaches_89_percent(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "paceline", "train", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run")], capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stderr
    ended = summary(tmp_path / "run")
    assert ended["top1"] >= 89
    assert ended["world_size"] == ranks
    assert f"report: {tmp_path / 'run/report.html'}" in done.stdout
