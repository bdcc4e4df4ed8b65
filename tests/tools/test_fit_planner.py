"""The tool that fits the planner's constants to measured systems."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import fit_planner as tool

COLUMNS = (
    "round",
    "gpu",
    "accelerator",
    "nodes",
    "acc_per_node",
    "gbs",
    "step_ms",
    "network",
    "framework",
)
# Round, GPU, board, nodes, GPUs of a node, global batch, network.
MADE = [
    ("v1.0", "A100", "A100-SXM4-80GB (400W)", 1, 8, 3264, ""),
    (
        "v1.0",
        "A100",
        "A100-SXM4-80GB (400W)",
        8,
        8,
        3264,
        "Compute: 8x ConnectX-6 IB HDR 200Gb/Sec",
    ),
    ("v2.0", "A100", "A100-PCIE-40GB (250W)", 4, 8, 8192, "1x ConnectX-5 IB EDR 100Gb/Sec"),
    ("v3.0", "H100", "H100-SXM5-80GB", 1, 8, 3200, ""),
    ("v3.0", "H100", "H100-SXM5-80GB", 8, 8, 3200, "Compute: 8x ConnectX-7 IB NDR 400Gb/s"),
    ("v0.7", "V100", "V100-SXM3-32GB (450W)", 1, 16, 3328, ""),
    ("v0.7", "V100", "V100-SXM2-16GB", 2, 8, 1664, "2x ConnectX-5 IB EDR 100Gb/Sec"),
]


def table(path: Path, steps_ms: list[float]) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for row, step in zip(MADE, steps_ms, strict=True):
            rows.writerow([*row[:6], step, row[6], "framework"])
    return path


def test_rows_become_systems(tmp_path: Path) -> None:
    systems = tool.read_systems(table(tmp_path / "made.csv", [1.0] * len(MADE)))
    assert [s.gpu.name for s in systems] == [
        "A100", "A100", "A100-PCIE-40GB", "H100", "H100", "V100", "V100-SXM2"
    ]  # fmt: skip
    assert [(s.links, s.link_gbps) for s in systems[1:3]] == [(8, 200.0), (1, 100.0)]
    assert systems[2].gpu.watts == 250
    assert systems[1].batch == 51


def test_the_constants_behind_made_up_systems_are_found(tmp_path: Path) -> None:
    """Steps predicted with other constants than the prior: the fit predicts them, and comes closer."""
    truth = np.array([value for value, _ in tool.PRIORS.values()])
    truth[:3] *= (1.15, 0.9, 1.2)
    law = tool.law_of(truth)
    path = tmp_path / "made.csv"
    blank = tool.read_systems(table(path, [1.0] * len(MADE)))
    seconds = [tool.predicted(system, law)["predicted_ms"] for system in blank]
    systems = tool.read_systems(table(path, seconds))
    fit = tool.Fit(systems)
    away = [abs(tool.predicted(system, fit.law)["error"]) for system in systems]
    assert max(away) < 0.03
    for name in ("matrix_share", "memory_share"):
        assert getattr(fit.law, name) == pytest.approx(getattr(law, name), rel=0.06)


def test_the_committed_constants_are_of_this_form() -> None:
    from paceline.planner.accelerators import step_constants

    law = step_constants()
    assert set(vars(law)) - {"residual", "software"} == {n for n in tool.PRIORS if " " not in n}
    assert 0.02 < law.residual < 0.10
