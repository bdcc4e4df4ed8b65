"""Extension packages can be deleted: training has the same bits, and what needs one gets one line."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from cli_runs import Done, run, run_two, small, summary
from design.hidden import hide
from paceline import alternatives

EXTENSIONS = (
    "accel",
    "alternatives",
    "planner",
    "recipes",
    "rehearsal",
    "report",
    "trackers",
    "tune",
)
METHODS = [f"alternatives.{module.name}" for module in pkgutil.iter_modules(alternatives.__path__)]
# A setting that asks for each method.
CHOSEN = {
    ".".join(place.partition(":")[0].split(".")[:2]): f"{chooser}={name}"
    for kind, chooser in (
        ("strategies", "run.strategy"), ("wires", "comm.wire"), ("optimizers", "optim.name"),
        ("schedules", "optim.schedule"),
    )
    for name, place in alternatives.PROVIDES[kind].items()
}  # fmt: skip
assert sorted(CHOSEN) == sorted(METHODS)


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


@pytest.mark.parametrize(
    "packages", [*((name,) for name in [*EXTENSIONS, *METHODS]), EXTENSIONS], ids="+".join
)
def test_a_training_has_the_same_weights(
    packages: tuple[str, ...], usual: str, tmp_path: Path
) -> None:
    assert weights(small("--epochs", "1"), tmp_path / "run", packages) == usual


def test_two_ranks_have_the_same_weights_without_any(tmp_path: Path) -> None:
    found = set()
    for packages in ((), EXTENSIONS):
        folder = tmp_path / f"without_{len(packages)}"
        folder.mkdir()
        arguments = small("--epochs", "1", "--output", "run")
        for done in run_two(arguments, folder, [partial(hide, packages)] * 2):
            assert done.code == 0, done.err
        found.add(summary(folder / "run")["weights_sha256"])
    assert len(found) == 1


@pytest.mark.parametrize(
    ("package", "arguments", "named"),
    [
        ("accel", small("--compile", "off"), "run.accel"),
        ("alternatives", small("--set", "run.strategy=unequal"), "run.strategy"),
        *((name, small("--set", asked), asked.partition("=")[0]) for name, asked in CHOSEN.items()),
        ("recipes", ["train", "auto", *small()[1:]], "recipe"),
        ("trackers", small("--set", "run.trackers=['csv']"), "run.trackers"),
        ("rehearsal", ["rehearse", *small()[1:], "--nodes", "1", "--gpus-per-node", "2"],
         "run.rehearsal"),
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
