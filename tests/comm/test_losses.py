"""The log of lost members: one order for all readers, no gaps, and a wait that ends at once."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from paceline.comm.losses import LossLog
from paceline.core.untrusted import ParseError


@pytest.fixture
def store() -> TCPStore:
    limit = timedelta(seconds=60)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)


def test_all_readers_see_the_same_order(store: TCPStore) -> None:
    """Eight supervisors report at the same time, each over a connection of its own."""
    logs = [LossLog(store).own_connection() for _ in range(8)]
    threads = [
        threading.Thread(target=log.report, args=([2 * node, 2 * node + 1], f"host {node}"))
        for node, log in enumerate(logs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.read()
    assert {tuple(log.lost.items()) for log in logs} == {tuple(logs[0].lost.items())}
    assert sorted(logs[0].lost) == list(range(16))
    assert {log.length for log in logs} == {8}
    assert not logs[0].read()
    assert logs[0].lost[5] == "host 2"


def test_a_reader_waits_for_the_next_entry(store: TCPStore) -> None:
    log = LossLog(store)
    log.report([1], "killed")
    waiting, lost = log.own_connection(), list[int]()
    thread = threading.Thread(target=lambda: waiting.wait() and lost.extend(waiting.lost))
    thread.start()
    assert not log.has_begun()
    log.begin()
    log.report([3], "killed, too")
    log.finish()
    assert waiting.has_begun()
    thread.join(60)
    assert lost[:2] == [1, 3]
    waiting.read()
    assert waiting.finished
    assert waiting.length == 3


def test_a_silent_member_is_evicted_once(store: TCPStore) -> None:
    log = LossLog(store)
    log.evict(2, "rank 2 is silent")
    log.evict(2, "rank 2 is silent")
    log.evict(0, "rank 0 is silent")
    supervisor = log.own_connection()
    assert [member for member, _ in supervisor.evictions()] == [2, 0]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"lost": [-1]}', '{"lost": 3}', '{"lost": [], "cause": 1}']
)
def test_entries_that_nobody_can_have_written_are_refused(text: str) -> None:
    store = HashStore()
    store.set("paceline/elastic/log/1", text)
    log = LossLog(store)
    if text:
        with pytest.raises(ParseError):
            log.read()
    else:
        assert not log.read()
