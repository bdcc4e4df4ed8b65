"""Exchanges that remember something from step to step: their state is in the checkpoint, a resumed run is
bit-identical, and on another number of ranks it is dropped with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_runs import summary
from paceline.train.checkpoint import Checkpoint
from ranks import run_ranks
from small_runs import run_small

EVERY_STEP: dict[str, Any] = {"checkpoint__interval_steps": 1, "checkpoint__keep": 99}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("residuals", {"comm__wire": "int8", "comm__fusion_mib": 0.02}),
}


def _run(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that remembers nothing, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run_ranks(2, _run, str(folder), EVERY_STEP)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, plain_run: Path, name: str) -> None:
    kind, values = CASES[name]
    whole = run_ranks(2, _run, str(tmp_path / "a"), values | EVERY_STEP)[0]
    plain = summary(plain_run)
    assert whole["weights_sha256"] != plain["weights_sha256"]
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    state = Checkpoint.read(saved).exchange
    assert state["kind"] == kind
    assert len(state["ranks"]) == 2
    again = run_ranks(2, _run, str(tmp_path / "b"), values | {"run__resume": str(saved)})
    assert {summary["weights_sha256"] for summary in again} == {whole["weights_sha256"]}
    assert "exchange state" not in again[0]["chosen"]
    for field in ("exchange_state_bytes", "exchange_state_bytes_per_parameter"):
        assert whole[field] > 0
        assert plain[field] == 0
    sent = whole["exchange_bytes_per_step"] / plain["exchange_bytes_per_step"]
    assert 0.25 < sent < 0.3, "a rank sends less than its gradients"

    # Elsewhere: one rank exchanges nothing.
    alone = run_small(tmp_path / "c", run__resume=str(saved), **values).summary
    assert "dropped" in alone["chosen"]["exchange state"]
    assert kind in alone["chosen"]["exchange state"]
    assert "residuals" not in plain["chosen"].get("exchange state", "")


def test_a_checkpoint_without_the_state_starts_it_afresh(tmp_path: Path, plain_run: Path) -> None:
    saved = str(plain_run / "checkpoints/step-00000003.pt")
    values = CASES["int8"][1] | {"run__resume": saved}
    found = run_ranks(2, _run, str(tmp_path / "b"), values)[0]
    assert "start afresh" in found["chosen"]["exchange state"]
    assert not Checkpoint.read(Path(saved)).exchange
