"""The command `paceline rehearse`: a comparison, a dry run, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import IMAGES, SYNTHETIC, Call

SMALL = [
    "rehearse", *SYNTHETIC, *IMAGES, "--global-batch-size", "16", "--nodes", "2", "--gpus-per-node", "2",
]  # fmt: skip


def test_the_comparison_has_time_cost_and_energy(call: Call, tmp_path: Path) -> None:
    for number, gbps in enumerate((100, 400)):
        flags = ["--model", "resnet18", "--set", "data.image_size=32", "--gpu", "H100"]
        flags += ["--node-gbps", str(gbps), "--price-per-gpu-hour", "2"]
        flags += ["--epochs", "1", "--set", "data.synthetic_samples=8", "--global-batch-size", "8"]
        done = call(*SMALL, *flags, "--output", f"run{number}")
        assert done.code == 0, done.err
    table = call("compare", "run0", "run1").out
    for column in ("cluster time", "cost", "kWh"):
        assert column in table
    slow, fast = (
        json.loads((tmp_path / f"run{n}/summary.json").read_text())["rehearsal"] for n in (0, 1)
    )
    assert slow["step_s"] > fast["step_s"]


def test_a_dry_run_of_a_rehearsal(call: Call, tmp_path: Path) -> None:
    flags = [*SYNTHETIC, *IMAGES, "--global-batch-size", "16", "--set", "run.strategy=rehearsal",
             "--set", "run.rehearsal.nodes=2", "--set", "run.rehearsal.gpus_per_node=2"]  # fmt: skip
    done = call("train", *flags, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "rehearsal: of 4 ranks" in done.out
    done = call("lr-find", "--set", "run.strategy=rehearsal", "--set", "run.rehearsal.nodes=2")
    assert "run.strategy" in done.error_line()
    assert done.code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nodes", "0"], "run.rehearsal.nodes"),
        (["--nodes", "many"], "run.rehearsal.nodes"),
        (["--gpu", "H1000"], "H1000"),
        (["--profile", "missing.toml"], "run.rehearsal.profile"),
        (["--gpus-per-node", "3"], "run.global_batch_size"),
    ],
)
def test_a_mistake_is_one_line(call: Call, flags: list[str], words: str) -> None:
    done = call(*SMALL, *flags)
    assert words in done.error_line()
    assert done.code == 2
