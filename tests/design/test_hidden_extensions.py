"""Extension packages can be deleted: training has the same bits, and what needs one gets one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from cli_runs import Done, run, small
from design.hidden import hide

EXTENSIONS = ("accel", "planner", "rehearsal", "report", "trackers", "tune")


def run_without(packages: Sequence[str], arguments: list[str], folder: Path) -> Done:
    return run(arguments, folder, fault=partial(hide, packages))


def weights(arguments: list[str], folder: Path, packages: Sequence[str] = ()) -> str:
    folder.mkdir()
    done = run_without(packages, [*arguments, "--output", "run"], folder)
    assert done.code == 0, done.err
    found: str = json.loads((folder / "run/summary.json").read_text())["weights_sha256"]
    notes = [
        line
        for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        if "no report" in line
    ]
    assert len(notes) == ("report" in packages)
    assert (folder / "run/report.html").exists() == ("report" not in packages)
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(small("--epochs", "1"), tmp_path_factory.mktemp("usual") / "run")


@pytest.mark.parametrize("packages", [*((name,) for name in EXTENSIONS), EXTENSIONS], ids="+".join)
def test_a_training_has_the_same_weights(
    packages: tuple[str, ...], usual: str, tmp_path: Path
) -> None:
    assert weights(small("--epochs", "1"), tmp_path / "run", packages) == usual


@pytest.mark.parametrize(
    ("package", "arguments", "named"),
    [
        ("accel", small("--compile", "off"), "run.accel"),
        ("trackers", small("--set", "run.trackers=['csv']"), "run.trackers"),
        ("rehearsal", ["rehearse", *small()[1:], "--nodes", "1", "--gpus-per-node", "2"],
         "run.strategy"),
        ("planner", ["rehearse", *small()[1:], "--nodes", "1", "--gpus-per-node", "2"],
         "run.strategy"),
        ("planner", ["plan", "--gpu", "H100"], "paceline plan"),
        ("tune", ["profile"], "paceline profile"),
        ("report", ["compare", "a", "b"], "paceline compare"),
    ],
)  # fmt: skip
def test_what_needs_a_hidden_package_gets_one_line(
    package: str, arguments: list[str], named: str, tmp_path: Path
) -> None:
    line = run_without([package], arguments, tmp_path).error_line()
    assert named in line
    assert f"paceline.{package}" in line


def test_help_leaves_out_the_commands_of_a_hidden_package(tmp_path: Path) -> None:
    done = run_without(["planner"], ["--help"], tmp_path)
    assert done.code == 0, done.err
    listed = {line.split()[0] for line in done.out.splitlines() if line.startswith("  ")}
    assert "train" in listed
    assert "plan" not in listed
