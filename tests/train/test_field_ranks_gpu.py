"""The options that exist only with several ranks, on one GPU that two ranks share over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alternatives.test_unequal import REBALANCED, with_slow_rank
from ranks import run_ranks
from small_runs import run_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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
