"""The series of the comparison, at a tiny scale on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.config import load_config

TOOL = Path(__file__).parents[2] / "tools" / "field_series.py"
TINY = [
    "--model", "resnet_tiny", "--batches", "256",
    *(word for text in (
        "data.source=synthetic", "data.synthetic_samples=64", "data.synthetic_classes=4",
        "data.image_size=28", "data.channels=1", "data.mean=[0.5]", "data.std=[0.25]",
        "model.stem=auto", "model.num_classes=4", "run.epochs=1", "run.device=cpu", "run.threads=1",
        "run.global_batch_size=16", "run.batch_size=16", "data.workers=1",
    ) for word in ("--set", text)),
]  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("field_series", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["field_series"] = module
    spec.loader.exec_module(module)
    return module


def test_every_planned_run_has_valid_settings(tool: ModuleType) -> None:
    names = set()
    for option in tool.OPTIONS:
        for batch in option.middles:
            for factor in tool.FACTORS:
                planned = tool.Planned(option, batch, option.middles[batch] * factor, 0)
                config = load_config("cifar10-resnet18", planned.settings())
                first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
                unit = config.run.batch_size
                assert first % unit == 0
                config.optim.batch_growth.after(
                    first, unit, config.optim.decay_epochs, config.optim.batch_limit
                )
                names.add(planned.name)
    assert len(names) == sum(3 * len(option.middles) for option in tool.OPTIONS)
    # The rows of growth and of its baseline differ in the growth alone.
    grows, stays = (next(o for o in tool.OPTIONS if o.name == n) for n in ("growth", "no-growth"))
    for batch in tool.ENDS:
        baseline = stays.at(batch)
        more = {key for key, value in grows.at(batch).items() if baseline.get(key) != value}
        assert more == {"optim.batch_schedule", "optim.batch_limit"}


def test_a_series_tunes_trains_and_continues(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path / "out"), *TINY, "--only", "sgd"]
    assert tool.main([*command, "--seconds", "0"]) == 3, "no time at all"
    assert not (tmp_path / "out/sgd-b256-0.1-s0").exists()
    assert tool.main(command) == 0
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert len(folders) == 5, "three values with seed 0, the best with seeds 1 and 2"
    log = (tmp_path / "out/tuning.md").read_text().splitlines()
    assert log[2].startswith("| sgd | 256 | `optim.lr` | 0.1 → ")
    compare = (tmp_path / "out/compare.sh").read_text()
    assert compare.count("-s0") == compare.count("-s1") == compare.count("-s2") == 1
    capsys.readouterr()
    summary = tmp_path / "out" / folders[0] / "summary.json"
    changed = summary.stat().st_mtime_ns
    assert tool.main(command) == 0
    assert capsys.readouterr().out == "", "everything was done"
    assert summary.stat().st_mtime_ns == changed
    assert json.loads(summary.read_text())["state_bytes_per_parameter"] == pytest.approx(4, abs=0.1)


def test_the_list_of_runs(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["out", "--list", "--only", "one-cycle*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2 * 3
