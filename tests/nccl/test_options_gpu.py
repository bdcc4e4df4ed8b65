"""The options for several ranks over NCCL: 8-bit wires, hooks of torch, central, asynchronous SGD, batch
norm over ranks and unequal shares, on two ranks that start once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from nccl.jobs import ROOT, finished, needs_gpu
from nccl.options import CHOSEN, OPTIONS

pytestmark = [*needs_gpu, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks ended with, by the name of the option."""
    folder = tmp_path_factory.mktemp("options")
    script = str(ROOT / "tests" / "nccl" / "options.py")
    finished((2,), [script, "--results", str(folder)], folder / "logs", limit_s=200)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_8_bit_sums_are_exact_where_8_bits_hold_them(ranks: list[dict[str, Any]]) -> None:
    assert [rank["exact sum"] for rank in ranks] == [[], []]


@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert (first["steps"], first["stopped_by"]) == (7, "finished")
    assert first["chosen"]["backend"] == "nccl"
    entry, words = CHOSEN[name]
    assert words in first["chosen"][entry]
    assert math.isfinite(first["val_loss"])
    keeps = name in ("int8", "fp8", "asynchronous")
    assert (first["exchange_state_bytes"] > 0) == keeps
