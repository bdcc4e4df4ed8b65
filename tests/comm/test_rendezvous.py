from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from paceline.comm.rendezvous import Meeting, explain, meet
from paceline.core.errors import CommError
from paceline.core.topology import Topology
from ranks import free_port

RANK0 = Topology(rank=0, world_size=2, local_world_size=2, launcher="environment")
RANK1 = replace(RANK0, rank=1, local_rank=1)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a torchrun agent, which outlives its ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _meet_all(port: int, timeout_s: float = 20) -> list[Meeting]:
    with ThreadPoolExecutor(2) as pool:
        ranks = [replace(rank, master_port=port) for rank in (RANK0, RANK1)]
        return list(pool.map(lambda rank: meet(rank, timeout_s), ranks))


def test_ranks_that_met_share_a_store() -> None:
    first, second = _meet_all(free_port())
    first.store.set("word", "heard")
    assert second.store.get("word") == b"heard"
    assert not first.restarted


def test_a_new_attempt_finds_nothing_of_the_last_in_the_agents_store(agent: TCPStore) -> None:
    before = _meet_all(agent.port)
    before[1].store.set("verdict", "of the last attempt")
    after = _meet_all(agent.port)
    assert not after[0].store.check(["verdict"])
    assert [meeting[0].restarted for meeting in (before, after)] == [False, True]


def test_the_greeting_of_a_dead_rank_is_no_rank(agent: TCPStore) -> None:
    agent.set("paceline-lobby/greeting/1", "left-by-the-dead 0")
    with pytest.raises(CommError, match=r"rank 1 of 2 did not come to 127\.0\.0\.1:\d+ within 1 s"):
        meet(replace(RANK0, master_port=agent.port), timeout_s=1)
    first, second = _meet_all(agent.port)
    first.store.set("word", "heard")
    assert second.store.get("word") == b"heard"


def test_one_agent_that_counts_a_restart_is_enough(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, replace(RANK1, master_port=agent.port), 20)
        agent.wait(["paceline-lobby/greeting/1"], timedelta(seconds=20))
        # The two run in one process here; by now rank 1 has said what its own agent counts.
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert meet(replace(RANK0, master_port=agent.port), 20).restarted
        other.result()


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CommError) as caught:
            meet(replace(RANK0, master_port=port), timeout_s=5)
    assert f"127.0.0.1:{port} is in use" in str(caught.value)
    assert "MASTER_PORT" in caught.value.remedy


def test_a_rank_0_that_never_comes_is_not_waited_for_longer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CommError, match="rank 1 did not meet the others at 127.0.0.1:1 within 1 s"):
        meet(replace(RANK1, master_port=1), timeout_s=1)
    # The error is the only thing said: torch's own words would be pages.
    assert capfd.readouterr().err == ""


def test_rank_0_may_come_later(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, replace(RANK1, master_port=port), 20)
        time.sleep(0.3)
        first = meet(replace(RANK0, master_port=port), 20)
        first.store.set("word", "heard")
        assert early.result().store.get("word") == b"heard"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("Permission denied"), "may not listen"),
        (RuntimeError("getaddrinfo failed: Name or service not known"), "cannot be resolved"),
        (socket.gaierror(-3, "Temporary failure in name resolution"), "cannot be resolved"),
        (ValueError("port must have value"), "is not an address"),
    ],
)
def test_other_causes_have_their_own_words(error: Exception, words: str) -> None:
    cause, remedy = explain("host:80", RANK0, error, 5)
    assert words in cause
    assert remedy
