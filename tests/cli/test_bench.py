"""`paceline bench` through the real command."""

from __future__ import annotations

import json
import subprocess
import sys

SMALL = ("--model", "resnet_tiny", "--image-size", "28", "--classes", "5", "-b", "4",
         "--steps", "2", "--warm-up", "1", "--device", "cpu")  # fmt: skip


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_step_prints_one_json_object_with_rows_ratios_and_environment() -> None:
    done = paceline("bench", "step", *SMALL, "--together", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["rows"]] == ["ours", "plain fp32"]
    assert report["ratios"]["ours / plain fp32"] > 0
    assert report["versions"]["torch"]
    assert report["settings"]["batch_size"] == 4


def test_optimizer_prints_a_table() -> None:
    done = paceline(
        "bench", "optimizer", "--model", "resnet_tiny", "--repeats", "2", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    assert "ours lars" in done.stdout
    assert "MB to move" in " ".join(done.stdout.split())


def test_mistakes_are_one_line() -> None:
    for arguments, words in (
        (("step", "--model", "resnet51"), "model.name = 'resnet51': is not a model"),
        (("step", "--row", "theirs"), "--row = 'theirs': unknown"),
        (("step", "--steps", "0"), "--steps = 0: must be at least 1"),
        (("optimizer", "--device", "gpu"), "--device = 'gpu': unknown"),
        (("optimizer", "--amp-dtype", "fp8"), "precision.amp_dtype = 'fp8': unknown"),
    ):
        done = paceline("bench", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert words in done.stderr
        assert done.stderr.count("\n") <= 1
