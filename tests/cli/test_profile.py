from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.plan import PlanFile
from paceline.planner.plan_parts import required_profile


def ask(*flags: str, command: str = "profile") -> str:
    words = [command, *flags]
    return CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False).output


def test_a_step_is_measured_and_planned_with(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    flags = ("--model", "resnet_tiny", "--image-size", "32", "--classes", "10", "--device", "cpu",
             "--steps", "2", "--warm-up", "1", "-b", "8", "--output", str(file))  # fmt: skip
    assert "Written" in ask(*flags)
    work = required_profile(PlanFile.read(file))
    assert work.model == "resnet_tiny"
    ready = [gradient.ready for gradient in work.gradients]
    assert 0 < ready[0] < ready[-1] <= 1
    assert ready == sorted(ready)
    with pytest.raises(ConfigError, match="exists already"):
        ask(*flags)
    plan = partial(ask, "--profile", str(file), command="plan")
    assert '"images_per_s"' in plan("--nodes", "2", "--gpus-per-node", "1", "--json")
    with pytest.raises(ConfigError, match="model of the profile, resnet_tiny"):
        plan("--model", "alexnet")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "resnet5"), "did you mean"),
        (("--output", "no/where/p.toml"), "folder"),
        (("--steps", "0"), "at least 1"),
        (("-b", "0"), "at least 1"),
    ],
)
def test_mistakes_are_one_line(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask("--device", "cpu", *flags)


@pytest.mark.gpu
def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    """The GPU's own clock orders the gradients within backward."""
    file = tmp_path / "p.toml"
    ask("--model", "resnet18", "--image-size", "64", "--classes", "10", "--device", "cuda", "--steps",
        "5", "--warm-up", "3", "-b", "64", "-b", "256", "--output", str(file))  # fmt: skip
    work = required_profile(PlanFile.read(file))
    ready = [gradient.ready for gradient in work.gradients]
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] <= 1
    assert work.batches == (64, 256)
