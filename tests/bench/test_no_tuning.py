"""The comparison without tuning: subsets, peers and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.no_tuning import data
from benchmarks.no_tuning.peers import MuonWithAdamW
from benchmarks.no_tuning.runs import Cell, rate_cells, settings_of, table_cells, train
from benchmarks.no_tuning.table import show
from paceline.models import parameter_groups


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 24 training images of each data set, which are random colors."""

    class Album(data.Source):
        def __init__(self, split: str) -> None:
            draws = np.random.default_rng(len(split))
            self.classes, self.labels = ["a", "b"], [0, 1] * 12
            self.images = draws.integers(0, 256, (24, 8, 8, 3), np.uint8)

        def read(self, i: int) -> data.Pixels:
            return self.images[i]

    monkeypatch.setattr(data, "open_source", lambda _, split: Album(split))
    data.prepare("cifar10", tmp_path, tmp_path)
    return tmp_path


def test_subsets_are_read_as_they_were_written(folder: Path) -> None:
    subset = data.load("cifar10", folder, "train")
    facts = json.loads((folder / "cifar10.json").read_text())
    assert len(subset) == len(facts["train"]["labels"]) == 24
    path = folder / "cifar10-val.xz"
    path.write_bytes((folder / "cifar10-train.xz").read_bytes())
    with pytest.raises(ValueError, match="damaged"):
        data.load("cifar10", folder, "val")


@pytest.mark.parametrize("method", ["ours", "ours-all", "torch-sgd", "torch-muon"])
def test_a_method_trains(folder: Path, method: str) -> None:
    line = train(Cell("cifar10", "cnn", 8, method, epochs=1), folder, "cpu", {})
    assert "error" not in line
    assert 0 <= line["top1"] <= 100
    assert (line["used"]["name"] == "muon") == method.startswith("ours")


def test_all_methods_differ_only_in_the_optimizer() -> None:
    values: list[dict[str, Any]] = [
        settings_of(cell, 10, 3, 32, "cpu") for cell in table_cells(1) if cell.method != "ours-all"
    ]
    shared = [{k: v for k, v in each.items() if not k.startswith("optim.")} for each in values]
    per_cell = len(shared) // 18
    assert all(one == shared[n - n % per_cell] for n, one in enumerate(shared))


def test_torch_muon_updates_filters_in_place() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))
    net = net.to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = MuonWithAdamW([dict(group) for group in parameter_groups(net, 0.1)])
    net(torch.randn(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    assert len(optimizer.views) == 2
    assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_tables_have_regret_and_worst_cell() -> None:
    accuracy = {"ours": (90.0, 80.0), "torch-sgd": (91.0, 70.0), "torch-adamw": (85.0, 75.0)}
    lines = [
        {"data": "cifar10", "net": "cnn", "batch": batch, "method": name, "rate": None, "top1": top1}
        for name, values in accuracy.items() for batch, top1 in zip((64, 2000), values, strict=True)
    ]  # fmt: skip
    rows = show(lines).splitlines()
    assert rows[4].startswith("| ours | 2 | 85.00 | 0.50 | 1.00 (cifar10 cnn 64)")
    assert rows[5].startswith("| torch-sgd | 2 | 80.50 | 5.00 | 10.00 (cifar10 cnn 2000) | -4.50")
    cells = rate_cells("sgd", [None, 0.1], ("cnn",), ("cifar10",), (32,), 1)
    assert [cell.rate for cell in cells] == [None, 0.1]
