"""Messages that no rank has written, in the store that anybody who reaches the port can write to."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from paceline.comm.agreement import Agreement
from paceline.comm.job import RankHost, RankHosts, post_hosts
from paceline.comm.progress import RankProgress
from paceline.comm.rendezvous import Meeting, meet
from paceline.core.errors import CommError
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError

RANK0 = Topology(rank=0, world_size=2, local_world_size=2, launcher="environment")
RANK1 = replace(RANK0, rank=1, local_rank=1)
LOBBY = "paceline-lobby"
GARBAGE = (
    "{}", "[1]", '{"job": {}}', "", "null", "\0", "[" * 5000, '{"rank": 1e400}',
    json.dumps({"token": "x", "rank": 1, "restarts": 0, "at": ["a", "b"], "job": {}}),
    json.dumps({"token": "0" * 32, "rank": -1, "restarts": "1", "at": [1, 2], "job": None}),
)  # fmt: skip


class NeverOpened(dict[Any, Any]):
    """Keeps nothing: every rank here stands for a new process."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nobody asks for it."""


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setattr("paceline.comm.store._opened", NeverOpened())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet_all(port: int) -> list[Meeting]:
    with ThreadPoolExecutor(2) as pool:
        ranks = [replace(rank, master_port=port) for rank in (RANK0, RANK1)]
        return list(pool.map(lambda rank: meet(rank, 100), ranks))


def check_shared(meetings: list[Meeting]) -> None:
    meetings[0].store.set("key", "value")
    assert meetings[1].store.get("key") == b"value"


def test_greetings_of_strangers_are_ignored(agent: TCPStore) -> None:
    for text in GARBAGE:
        agent.set(f"{LOBBY}/greeting/{agent.add(f'{LOBBY}/greetings', 1)}", text)
    agent.set(f"{LOBBY}/job", "{}")
    check_shared(meet_all(agent.port))


@pytest.mark.parametrize("jump", [30_000_000, 1 << 61, -5, -(1 << 61)])
def test_a_stranger_that_moves_the_counter(agent: TCPStore, jump: int) -> None:
    agent.add(f"{LOBBY}/greetings", 1)
    agent.add(f"{LOBBY}/greetings", jump)
    check_shared(meet_all(agent.port))


def test_a_counter_that_is_overwritten_while_rank_0_waits(agent: TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, replace(RANK0, master_port=agent.port), 100)
        agent.wait([f"{LOBBY}/job"], timedelta(seconds=100))
        agent.set(f"{LOBBY}/greetings", "no number")
        while agent.get(f"{LOBBY}/greetings") == b"no number":
            pass
        second = pool.submit(meet, replace(RANK1, master_port=agent.port), 100)
        check_shared([first.result(), second.result()])


@pytest.mark.parametrize("text", [text for text in GARBAGE if text])
def test_messages_of_a_running_job(text: str) -> None:
    store = HashStore()
    agreement = Agreement(store, replace(RANK0, world_size=1), 1.0)
    store.set("paceline/agree/1/start/reports", text + "\n")
    agreement.agree("start", facts={"seed": 1})
    for number, key in enumerate(("paceline/verdict/{}", "paceline/agree/{}/next/facts"), start=2):
        store.set(key.format(number), text)
        with pytest.raises(CommError):
            agreement.agree("next", facts={"seed": 1})
    store.set("paceline/fault", text)
    assert agreement.read_fault() is None
    agreement.post_fault(CommError("lost"))
    with pytest.raises(ParseError):
        RankProgress.from_text(text)
    post_hosts(store, {0: RankHost("node0", "10.0.0.1")})
    assert RankHosts.read(store).of(0) is None
    store.set("paceline/hosts", text)
    with pytest.raises(ParseError):
        RankHosts.read(store)
