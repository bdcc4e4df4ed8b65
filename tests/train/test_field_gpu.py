"""On a GPU: batches that grow with a captured micro-step, RMSprop warm-up, and SVRG's passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from no_waiting import no_waiting
from paceline.alternatives.rms_warmup.optimizer import RMSpropWarmup
from paceline.alternatives.svrg.optimizer import SVRG
from small_runs import run_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [e["loss"] for e in map(json.loads, lines) if e["event"] == "step"]


GROWS: dict[str, Any] = {
    "run__epochs": 3, "run__global_batch_size": None, "run__batch_size": 8,
    "optim__batch_schedule": "0:8,1:16,2:32", "precision__amp_dtype": "fp32",
    "data__image_size": 28,
}  # fmt: skip


def test_a_captured_micro_step_serves_all_batches(tmp_path: Path) -> None:
    run_small(tmp_path / "cpu", **GROWS)
    captured = run_small(tmp_path / "gpu", run__device="cuda", run__cuda_graphs="on", **GROWS)
    assert captured.summary["images"] == 3 * 56
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-2)


@pytest.mark.parametrize("name", ["halp", "svrg", "rmsprop_warmup"])
def test_runs_follow_those_on_the_cpu(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {
        "optim__name": name, "optim__momentum": 0.0, "optim__svrg__mu": 1.0, "data__augment": "none",
        "data__flip": False, "precision__amp_dtype": "fp32", "optim__svrg__bits": 16,
        "data__image_size": 28,
    }  # fmt: skip
    run_small(tmp_path / "cpu", **values)
    run_small(tmp_path / "gpu", run__device="cuda", **values)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-2)


@pytest.mark.parametrize("kind", [RMSpropWarmup, SVRG])
def test_updates_do_not_wait_for_the_device(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    if isinstance(optimizer, SVRG):
        optimizer.center()
    optimizer.step()
    with no_waiting():
        optimizer.step()
