from __future__ import annotations

import json
import os

import pytest
from torch.distributed import HashStore

from paceline.comm.agreement import AgreedError, Agreement
from paceline.comm.rendezvous import meet
from paceline.core.errors import ConfigError, DataError
from paceline.core.topology import Topology
from ranks import run_ranks


def _agreement(timeout_s: float = 20.0) -> tuple[Agreement, Topology]:
    topology = Topology.from_env(os.environ)
    return Agreement(meet(topology, 20.0).store, topology, timeout_s), topology


def _settle_errors(rank: int) -> tuple[str, int]:
    agreement, _ = _agreement()
    agreement.settle("fine")
    error = DataError("no images in x", "check x") if rank == 1 else None
    with pytest.raises(AgreedError) as caught:
        agreement.settle("data", error)
    agreement.leave(5.0)  # the store must outlive the slower reader
    return str(caught.value), caught.value.exit_code


def _settle_facts(rank: int) -> str:
    agreement, _ = _agreement()
    agreement.settle("same", facts={"seed": 1})
    with pytest.raises(AgreedError) as caught:
        agreement.settle("differ", facts={"seed": 1, "lr": 0.1 + rank})
    agreement.leave(5.0)
    return str(caught.value)


def _absent(rank: int) -> str:
    agreement, _ = _agreement(timeout_s=1.0)
    if rank == 1:
        agreement.settle("start")
        return "left"
    agreement.settle("start")
    with pytest.raises(AgreedError) as caught:
        agreement.settle("alone")
    return str(caught.value)


def _fault(rank: int) -> str:
    agreement, _ = _agreement()
    if rank == 1:
        agreement.post_fault(ConfigError("optim.lr", 0, "too small"))
        agreement.post_fault(DataError("a later one"))
    found = agreement.read_fault(wait_s=10)
    agreement.leave(5.0)
    assert found is not None
    return f"{found} ({found.exit_code})"


def test_an_error_on_one_rank_is_raised_on_all_with_its_exit_code() -> None:
    assert run_ranks(2, _settle_errors) == [("rank 1: no images in x; check x", 1)] * 2


def test_different_facts_are_named_with_both_values() -> None:
    texts = run_ranks(2, _settle_facts)
    assert texts[0] == texts[1]
    assert "ranks differ in lr: 0.1 on rank 0, 1.1 on rank 1" in texts[0]


def test_a_rank_that_does_not_come_is_named() -> None:
    assert "rank 1 did not reach 'alone' within 1 s" in run_ranks(2, _absent)[0]


def test_the_first_fault_stays_and_all_can_read_it() -> None:
    assert run_ranks(2, _fault) == ["rank 1: optim.lr = 0: too small (2)"] * 2


def _fault_on_the_way(rank: int) -> str:
    agreement, _ = _agreement(timeout_s=300.0)
    if rank == 1:
        agreement.post_fault(DataError("out of memory", "free some"))
        agreement.leave(0.1)
        return "gone"
    with pytest.raises(AgreedError) as caught:
        agreement.settle("model")
    return str(caught.value)


def test_a_rank_that_failed_on_the_way_is_not_waited_for() -> None:
    assert run_ranks(2, _fault_on_the_way)[0] == "rank 1: out of memory; free some"


class _JustTooLate:
    """A store to which rank 0 writes its verdict, and then its fault, right after the first look."""

    def __init__(self) -> None:
        self.looks = 0

    def set(self, key: str, value: str) -> None:
        """Nobody reads it."""

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.looks > 1

    def get(self, key: str) -> bytes:
        word = {"error": "ranks differ", "code": 2}
        return json.dumps(word if key.endswith("verdict") else word | {"rank": 0}).encode()


def test_a_verdict_counts_before_the_fault_that_follows_from_it() -> None:
    agreement = Agreement(_JustTooLate(), Topology(rank=1, world_size=2), 5.0)  # type: ignore[arg-type]
    with pytest.raises(AgreedError) as caught:
        agreement.settle("configuration")
    assert str(caught.value) == "ranks differ"


def test_the_first_suspect_stays() -> None:
    """Survivors that leave break connections too."""
    store = HashStore()
    first, second = (Agreement(store, Topology(rank, 2, rank, 2), 1.0) for rank in (0, 1))
    assert first.first_suspect("rank 5 is gone") == "rank 5 is gone"
    assert second.first_suspect("rank 0 is gone") == "rank 5 is gone"
