"""Alternatives on a GPU, also with two ranks that share it over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from alternatives.test_unequal import REBALANCED, with_slow_rank
from no_waiting import no_waiting
from paceline.alternatives.rms_warmup.optimizer import RMSpropWarmup
from paceline.alternatives.svrg.optimizer import SVRG
from ranks import run_ranks
from small_runs import losses, run_small

pytestmark = pytest.mark.gpu


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


CASES: dict[str, dict[str, Any]] = {
    "int8": {"comm__wire": "int8"},
    "asynchronous": {"run__strategy": "asynchronous", "precision__amp_dtype": "bf16"},
    "shares": {"run__strategy": "unequal", "run__unequal__shares": "3:1"},
}


def _run(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    place: dict[str, Any] = {"run__device": "cuda", "comm__backend": "gloo"}
    return run_small(output, data__image_size=28, **place, **values).summary


@pytest.mark.parametrize("name", CASES)
def test_it_trains(tmp_path: Path, name: str) -> None:
    first, second = run_ranks(2, _run, str(tmp_path), CASES[name], timeout_s=120)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["steps"] == 7


def _slow(rank: int, output: str) -> dict[str, Any]:
    values = {**REBALANCED, "checkpoint__interval_steps": 5, "run__epochs": 4}
    return with_slow_rank(rank, lambda: _run(rank, output, values))


def test_micro_steps_are_captured_again_after_a_new_division(tmp_path: Path) -> None:
    first, second = run_ranks(2, _slow, str(tmp_path), timeout_s=120)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["images"] == 4 * 56
