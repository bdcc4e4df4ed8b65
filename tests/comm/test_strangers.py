"""Messages that no rank has written, in the store that anybody who reaches the port can write to."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

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
        agent.set(f"{LOBBY}/greeting/{agent.add(f'{LOBBY}/greetings', 1)}", text)
    agent.set(f"{LOBBY}/job", "{}")
    check_shared(*meet_all(agent.port))


@pytest.mark.parametrize("jump", [30_000_000, 1 << 61, -5, -(1 << 61)])
def test_a_stranger_that_moves_the_counter(agent: TCPStore, jump: int) -> None:
    agent.add(f"{LOBBY}/greetings", 1)
    agent.add(f"{LOBBY}/greetings", jump)
    check_shared(*meet_all(agent.port))


def test_a_counter_that_is_overwritten_while_rank_0_waits(agent: TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, replace(RANK0, master_port=agent.port), 100)
        agent.wait([f"{LOBBY}/job"], timedelta(seconds=100))
        agent.set(f"{LOBBY}/greetings", "no number")
        while agent.get(f"{LOBBY}/greetings") == b"no number":
            pass
        second = pool.submit(meet, replace(RANK1, master_port=agent.port), 100)
        check_shared(first.result(), second.result())
