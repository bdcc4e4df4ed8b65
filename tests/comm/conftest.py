"""Two ranks that meet in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import TCPStore

from paceline.comm.rendezvous import Meeting, meet
from paceline.core.topology import Topology

RANK0 = Topology(rank=0, world_size=2, local_world_size=2, launcher="environment")
RANK1 = replace(RANK0, rank=1, local_rank=1)


class NeverOpened(dict[Any, Any]):
    """A dictionary that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignores the value."""


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every rank of a test open its own store, as a new process would."""
    monkeypatch.setattr("paceline.comm.store._opened", NeverOpened())


@pytest.fixture
def agent(new_processes: None, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a torchrun agent, which outlives its ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet_all(port: int, timeout_s: float = 100) -> list[Meeting]:
    with ThreadPoolExecutor(2) as pool:
        ranks = [replace(rank, master_port=port) for rank in (RANK0, RANK1)]
        return list(pool.map(lambda rank: meet(rank, timeout_s), ranks))


def check_shared(first: Meeting, second: Meeting) -> None:
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
