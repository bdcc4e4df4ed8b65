"""The large-batch series, end to end on tiny cells, and its tables against sums by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from paceline.models import register_model

TOOLS = Path(__file__).parents[2] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


series, tables = load("large_batch_series"), load("large_batch_table")
PHASES = ("explore", "few", "main", "long", "models", "smoke")


def net(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(100, num_classes),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    register_model("series_net", net)
    small = series.ImageSet(160, 4, 12, 1, (0.5,), (0.25,), small=6)
    monkeypatch.setitem(series.SETS, "synthetic", small)


def cell(batch: str, optimizer: str, seed: int = 0, **more: Any) -> Any:
    return series.Cell("synthetic", "series_net", 18, batch, optimizer, seed=seed, **more)


@pytest.mark.parametrize("phase", PHASES)
def test_every_cell_has_valid_settings_of_its_own(phase: str, tmp_path: Path) -> None:
    cells = series.phase_cells(phase)
    assert len({c.key for c in cells}) == len(cells)
    found = {}
    for c in cells:
        config, chosen = series.cell_config(c, tmp_path)
        stages = config.optim.batch_growth.stages
        last = stages[-1][1] if stages else config.run.global_batch_size
        assert last == c.global_batch
        assert (config.optim.name == "muon") == (c.optimizer in ("rule", "muon"))
        assert bool(chosen) == (c.batch != "small")
        found[c.key] = {k: v for k, v in config.flat().items() if k != "run.name"}
    # An ingredient that changes nothing would say that it is worth nothing.
    distinct = {json.dumps(settings, sort_keys=True) for settings in found.values()}
    if phase not in ("explore", "few"):
        assert len(distinct) == len(cells)
    for c in cells:
        # The rule averages at 5 steps an epoch and not at 20, decays linearly and mixes no images.
        same = {("5", "average"), ("20", "no-average")} | {
            (batch, name)
            for batch in ("5", "20")
            for name in ("linear-decay", "no-cutmix", "no-cutmix-linear")
        }
        if c.ingredient != "rule" and (c.batch, c.ingredient) not in same:
            plain = series.dataclasses.replace(c, ingredient="rule")
            assert found[c.key] != found.get(plain.key)


def test_the_rule_is_developed_without_the_sets_and_models_that_judge_it() -> None:
    few = series.phase_cells("few")
    assert {c.set for c in few} == {"cifar10", "tinyimagenet25"}
    cells = series.phase_cells("explore")
    assert {c.set for c in cells} == {"cifar10", "tinyimagenet25", "fashion"}
    assert {c.model for c in cells} == {"resnet18"}
    # As many tries for the small batch as for a large one, on each set.
    tries = {b: sum(c.batch == b and c.set == "fashion" for c in cells) for b in ("small", "20")}
    assert tries["small"] >= tries["20"]


def run(out: Path, cells: list[Any], budget_s: float = 600.0, **more: Any) -> tuple[str, list[str]]:
    said: list[str] = []
    end = series.run_series(cells, out, {}, budget_s, "cpu", said.append, made_at="abc", **more)
    return end, said


@pytest.mark.slow
def test_cells_are_run_once_recorded_and_tabled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [
        cell("5", "rule"), cell("5", "lars"), cell("small", "sgd"),
        cell("5", "adamw"), series.Cell("cifar10", "series_net", 18, "5", "rule"),
    ]  # fmt: skip
    end, said = run(tmp_path, cells)
    assert end == "done"
    assert any("cifar10" in line for line in said)
    records = series.read_results(tmp_path / "results.jsonl")
    assert [record["key"] for record in records] == [c.key for c in cells[:4]]
    first, _, small, refused = records
    assert first["settings"]["optim.name"] == "muon"
    assert first["chosen"].startswith("batch 6 → 32, 5 steps an epoch, 90 in all")
    assert (first["steps"], first["commit"], first["global_batch"]) == (225, "abc", 32)
    assert small["steps"] == 480
    assert 0 <= small["top1"] <= 100
    assert refused["top1"] is None
    assert refused["error"].startswith("optim.name = 'adamw'")
    assert not list(tmp_path.glob("runs/*/checkpoints"))
    assert run(tmp_path, cells)[1][-1].startswith("done")
    assert len(series.read_results(tmp_path / "results.jsonl")) == 4
    elsewhere = run(tmp_path / "b", cells, earlier=[tmp_path / "results.jsonl"])
    assert elsewhere[0] == "done"
    assert not (tmp_path / "b/results.jsonl").exists()
    assert tables.main([str(tmp_path / "results.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert f"| synthetic | series_net | 18 | {small['top1']:.2f} (sgd) |" in printed
    assert refused["key"] in printed


@pytest.mark.slow
def test_a_cell_that_the_budget_stops_goes_on_where_it_was(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", [cell("5", "rule")])[0] == "done"
    data = series.open_set("synthetic", None)
    stopped = series.run_cell(cell("5", "rule"), data, tmp_path / "cut", time.monotonic(), "cpu")
    assert stopped is None
    assert run(tmp_path / "cut", [cell("5", "rule")])[0] == "done"
    (whole,), (cut,) = (
        series.read_results(tmp_path / name / "results.jsonl") for name in ("whole", "cut")
    )
    assert cut["weights_sha256"] == whole["weights_sha256"]


def test_processes_share_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell is run by the first that claims it; one that the budget stopped is free again."""
    cells, claims = [cell("5", "rule", seed=seed) for seed in range(3)], tmp_path / "claims"
    ran: list[str] = []

    def run_cell(one: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
        ran.append(one.key)
        done = {"key": one.key, **series.dataclasses.asdict(one), "top1": 50.0, "wall_s": 0.0}
        return done if len(ran) != 2 else None

    monkeypatch.setattr(series, "run_cell", run_cell)
    assert run(tmp_path / "a", cells, claims=claims)[0] == "budget"
    assert run(tmp_path / "b", cells, claims=claims)[0] == "done"
    keys = [c.key for c in cells]
    assert ran == [keys[0], keys[1], keys[1], keys[2]]


def test_no_cell_begins_that_would_outlast_the_budget(tmp_path: Path) -> None:
    slow = {"key": "x", "wall_s": 1e6, **series.dataclasses.asdict(cell("5", "rule", seed=9))}
    (tmp_path / "results.jsonl").write_text(json.dumps(slow) + "\n")
    end, said = run(tmp_path, [cell("5", "rule")])
    assert end == "budget"
    assert said == [f"budget: 1 cells left, next {cell('5', 'rule').key}"]
    assert run(tmp_path, [cell("small", "sgd")], budget_s=0)[0] == "budget"


def test_a_cut_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b')
    assert series.read_results(path) == [{"key": "a"}]
    assert path.read_text() == '{"key": "a"}\n'


def test_wrong_arguments_and_sets_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        series.main(["--phase", "smoke", "--out", str(tmp_path), "--data", "mnist"])
    assert "SET=DIR" in capsys.readouterr().err
    code = series.main(
        ["--phase", "explore", "--out", str(tmp_path), "--data", f"cifar10={tmp_path}/none",
         "--only", "cifar10/*/20/rule/rule/0"]
    )  # fmt: skip
    assert code == 1
    assert capsys.readouterr().err.startswith("large_batch_series: error: ")
    assert series.main(["--phase", "main", "--out", str(tmp_path), "--list"]) == 0
    assert "cifar10/resnet18/30/20/rule/rule/1  batch 2,500" in capsys.readouterr().out


def record(name: str, batch: str, way: tuple[str, str], seed: int, top1: float | None) -> Any:
    made = series.Cell(name, "resnet18", 30, batch, *way, seed)
    return {"key": made.key, **series.dataclasses.asdict(made), "top1": top1, "wall_s": 1.0}


def test_losses_are_to_the_best_small_batch_with_their_errors() -> None:
    tops = {
        ("cifar10", "small", ("sgd", "rule")): (94.0, 94.4, 94.2),
        ("cifar10", "small", ("muon", "rule")): (95.0, 95.4, 95.2),
        ("cifar10", "20", ("rule", "rule")): (95.0, 94.8, 94.9),
        ("fashion", "small", ("sgd", "rule")): (93.0, 93.2, 93.4),
        ("fashion", "20", ("rule", "rule")): (93.0, 93.0, 93.0),
        ("cifar10", "20", ("lars", "rule")): (94.0, 94.0, 94.3),
    }
    records = [
        record(*key, seed, top1) for key, values in tops.items() for seed, top1 in enumerate(values)
    ]
    # One seed is no better than the mean of three, however good.
    records.append(record("cifar10", "small", ("muon", "average"), 0, 99.0))
    rows = {line.split(" | ")[0].strip("| *"): line for line in tables.loss_table(records)}
    error = math.sqrt(0.04 / 3 + 0.01 / 3)
    assert f"95.20 ± 0.20 (muon) | 94.90 ± 0.10: -0.30 ± {error:.2f}" in rows["cifar10"]
    assert f"93.00 ± 0.00: -0.20 ± {math.sqrt(0.04 / 3):.2f}" in rows["fashion"]
    both = math.sqrt(error**2 + 0.04 / 3) / 2
    assert f"-0.25 ± {both:.2f}" in rows["mean over sets"]
    (lars,) = [line for line in tables.ingredient_table(records) if "lars" in line]
    assert "-0.80" in lars
    assert "the rule" in lars
