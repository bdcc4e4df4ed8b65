"""The optimizer's benchmark: every way really updates, and the floor counts bytes."""

from __future__ import annotations

import torch

from paceline.bench.optimizer import measure_all


def test_all_ways_are_measured_and_the_bytes_are_those_of_one_update() -> None:
    found = measure_all("resnet_tiny", torch.device("cpu"), amp_dtype="fp32", repeats=2, warm_up=1)
    names = [row["name"] for row in found["rows"]]
    assert names == [
        "ours lars",
        "ours sgd",
        "ours muon",
        "torch fused sgd",
        "lars, a loop over tensors",
    ]
    assert all(row["ms"] > 0 for row in found["rows"])
    assert found["bytes"] == found["elements"] * (4 + 4 + 4 * 5)
    half = measure_all("resnet_tiny", torch.device("cpu"), amp_dtype="bf16", repeats=1, warm_up=1)
    assert half["bytes"] == half["elements"] * (2 + 4 + 2 + 4 * 4 + 2)
