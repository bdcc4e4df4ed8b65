"""The large-batch series: its cells have valid settings; its tables against sums by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
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
PHASES = ("few", "main", "models", "smoke")


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
    if phase != "few":
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


def run(out: Path, cells: list[Any], budget_s: float = 600.0, **more: Any) -> tuple[str, list[str]]:
    said: list[str] = []
    end = series.run_series(cells, out, {}, budget_s, "cpu", said.append, made_at="abc", **more)
    return end, said


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
