"""DESIGN.md lists every module that a training step executes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from cli_runs import run_two
from data_sets import write_shards
from design.traced_step import install

ROOT = Path(__file__).parents[2]


def listed(start: str, end: str) -> list[str]:
    """Modules that DESIGN.md names between two headings, in order, as paths below src/paceline."""
    section = (ROOT / "DESIGN.md").read_text().split(start, 1)[1].split(end, 1)[0]
    names = [
        n for n in re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+)`", section) if n != "tests/design"
    ]
    return [f"{name}.py" for name in dict.fromkeys(names)]


@pytest.fixture(scope="module")
def path() -> list[str]:
    return listed("### An image", "### What else")


@pytest.fixture(scope="module")
def others() -> list[str]:
    """Parts of the path that its tables leave out, and observers."""
    return listed("### What else", "### A flag")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    place = tmp_path_factory.mktemp("traced")
    shards = write_shards(place / "shards", train=56)
    flags = ["train", "--data-dir", str(shards), "--model", "resnet_tiny", "-b", "4", "--epochs", "1",
             "--set", "data.image_size=32", "--set", "data.eval_resize=36", "--opt", "lars",
             "--set", "comm.algorithm=ring", "--output", str(place / "run")]  # fmt: skip
    traces = [partial(install, place / f"{rank}.json") for rank in range(2)]
    for done in run_two(flags, place, traces):
        assert done.code == 0, done.err
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["steps"] >= 6 for rank in found)
    return {module for rank in found for module in rank["modules"]}


def test_a_step_executes_only_listed_modules(
    traced: set[str], path: list[str], others: list[str]
) -> None:
    executed = {module for module in traced if not module.startswith("core/")}
    assert executed - set(path) - set(others) == set()


def test_a_step_executes_few_modules(traced: set[str]) -> None:
    """Observers and core apart."""
    observers = set(listed("- Observers:", "### A flag"))
    assert len({m for m in traced if not m.startswith("core/")} - observers) <= 30


def test_listed_modules_exist(path: list[str], others: list[str]) -> None:
    missing = [m for m in path + others if not (ROOT / "src" / "paceline" / m).exists()]
    assert missing == []
