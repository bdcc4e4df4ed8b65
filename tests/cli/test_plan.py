from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.plan.plan_file import PlanFile

KEYS = {
    "images_per_s", "images_per_s_per_gpu", "step_s", "compute_s", "exposed_comm_s",
    "input_stall_s", "efficiency", "uncertainty", "buffers",
}  # fmt: skip


def ask(*flags: str) -> str:
    found = CliRunner().invoke(app, ["plan", *flags], catch_exceptions=False, standalone_mode=False)
    return found.output


def test_json_table_page_and_plan(tmp_path: Path) -> None:
    flags = ("--gpu", "V100", "--nodes", "4", "-b", "64")
    page, plan = tmp_path / "p.html", tmp_path / "p.toml"
    found = json.loads(ask(*flags, "--json", "--plan-out", str(plan)))
    assert set(found) >= KEYS
    assert found["ranks"] == 32
    made = PlanFile.read(plan)
    assert len(made.plan.buckets) == len(found["buffers"])
    assert sum(b["tensors"] for b in found["buffers"]) == 161
    told = ask(*flags, "--html", str(page))
    assert "bound by" in told
    assert "<svg" in page.read_text()
    scored = json.loads(ask(*flags, "--json", "--with-plan", str(plan)))
    assert scored["step_s"] == pytest.approx(found["step_s"])
    with pytest.raises(ConfigError, match="is for a cluster with ranks = 32"):
        ask("--gpu", "V100", "--nodes", "8", "--with-plan", str(plan))


def test_slow_input_is_the_verdict() -> None:
    found = json.loads(ask("--gpu", "H100", "-b", "256", "--json", "--input-images-per-s", "1000"))
    assert found["bound_by"] == "input"
    assert found["images_per_s_per_gpu"] == pytest.approx(1000)
    assert found["uncertainty"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "either --gpu or --profile"),
        (("--gpu", "h101"), "did you mean 'H100'"),
        (("--gpu", "H100", "--model", "resnet51"), "did you mean 'resnet50'"),
        (("--gpu", "H100", "--nodes", "0"), "--nodes"),
        (("--gpu", "H100", "--node-gbps", "-1"), "--node-gbps"),
        (("--gpu", "H100", "-b", "0"), "--batch-size"),
        (("--gpu", "H100", "--epochs", "0"), "--epochs"),
        (("--gpu", "H100", "--epochs", "nan"), "--epochs"),
        (("--gpu", "H100", "--model", "alexnet", "--image-size", "32"), "too small"),
        (("--gpu", "H100", "--cluster", "c.toml", "--node-gbps", "9"), "in the cluster file"),
        (("--gpu", "H100", "--with-plan", "p.toml", "--wire", "float16"), "itself"),
        (("--gpu", "H100", "--algorithm", "rign"), "did you mean 'ring'"),
        (("--gpu", "H100", "--wire", "fp8"), "--wire"),
        (("--profile", "nowhere.toml"), "cannot be read"),
        (("--gpu", "H100", "--cluster", "nowhere.toml"), "cannot be read"),
    ],
)
def test_mistakes_are_one_line(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(*flags)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['paceline', 'plan', '--gpu', 'H100', '--json'];"
        "from paceline.cli.app import run_command; code = run_command();"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "resnet50"
