"""DESIGN.md lists every module that one training step executes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import rank_environments
from data_sets import write_shards

ROOT = Path(__file__).parents[2]
# Not part of the path of an image or a gradient: they watch it.
OBSERVERS = re.compile(r"^core/")


def listed(heading: str) -> list[str]:
    """Module paths in the section of DESIGN.md under `heading`, in order."""
    text = (ROOT / "DESIGN.md").read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return list(dict.fromkeys(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`", section)))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    place = tmp_path_factory.mktemp("traced")
    shards = write_shards(place / "shards", images=64)
    script = str(Path(__file__).parent / "traced_step.py")
    flags = ["train", "--data-dir", str(shards), "--model", "resnet18", "-b", "4", "--epochs", "1",
             "--set", "data.image_size=32", "--set", "data.eval_resize=36", "--opt", "lars",
             "--set", "comm.algorithm=ring", "--output", str(place / "run")]  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, script, str(place / f"{rank}.json"), *flags], env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank, env in enumerate(rank_environments(2))
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["steps"] >= 6 for rank in found)
    return {module for rank in found for module in rank["modules"]}


def test_a_traced_step_executes_only_listed_modules(traced: set[str]) -> None:
    path, observers = listed("Call path of a training step"), listed("Observers of a step")
    executed = {module for module in traced if not OBSERVERS.match(module)}
    assert executed - set(path) - set(observers) == set()
    assert len(path) <= 25
    assert len(traced) <= 35


def test_listed_modules_exist_and_most_are_executed(traced: set[str]) -> None:
    path = listed("Call path of a training step")
    assert [module for module in path if not (ROOT / "src/paceline" / module).exists()] == []
    built_before = {"cli/train.py", "trainer.py", "config.py", "train/build.py"}
    assert set(path) - traced - built_before - set(listed("Observers of a step")) == set()
