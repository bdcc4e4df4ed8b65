"""Messages that no rank has written: everyone who reaches the port can write to the store."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from comm.conftest import RANK0, RANK1, check_shared, meet_all
from paceline.comm.rendezvous import meet

LOBBY = "paceline-lobby"
GARBAGE = (
    "{}", "[1]", '{"job": {}}', "", "null", "\0", "[" * 5000, '{"rank": 1e400}',
    json.dumps({"token": "x", "rank": 1, "restarts": 0, "at": ["a", "b"], "job": {}}),
    json.dumps({"token": "0" * 32, "rank": -1, "restarts": "1", "at": [1, 2], "job": None}),
)  # fmt: skip


def test_greetings_of_strangers_are_ignored(agent: TCPStore) -> None:
    for text in GARBAGE:
        agent.queue_push(f"{LOBBY}/greetings", text)
    agent.set(f"{LOBBY}/job", "{}")
    check_shared(*meet_all(agent.port))


def test_a_rank_greets_again_if_a_stranger_takes_its_greeting(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.comm.rendezvous._WAIT_S", 0.2)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(meet, replace(RANK1, master_port=agent.port), 100)
        agent.queue_pop(f"{LOBBY}/greetings")
        first = pool.submit(meet, replace(RANK0, master_port=agent.port), 100)
        check_shared(first.result(), second.result())
