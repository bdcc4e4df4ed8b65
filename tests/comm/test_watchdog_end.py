"""However ranks end at once, all of them say the same one line, and each says it once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from paceline.comm.agreement import Agreement, PeerError
from paceline.comm.progress_board import ProgressBoard
from paceline.comm.watchdog import Watchdog
from paceline.comm.watchdog_mail import WatchdogMail
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology

TIMEOUT_S = 30.0  # no rank of these tests waits, so it never runs out


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def place(rank: int) -> Topology:
    return Topology(rank, 2, rank, 2, launcher="torchrun")


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline, "was not reached"
        time.sleep(0.01)


@pytest.fixture
def mails(store: Store) -> Iterator[list[WatchdogMail]]:
    both = [WatchdogMail(store, place(rank), 0.05) for rank in range(2)]
    yield both
    for mail in both:
        mail.close()


def test_of_two_proposals_at_once_the_verdict_is_the_fault_that_others_read(
    store: Store, mails: list[WatchdogMail], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's fault comes between rank 1's look at the faults and its own."""
    post = Agreement.post_fault

    def late(self: Agreement, error: PacelineError) -> None:
        if self._topology.rank == 1:
            post(Agreement(store, place(0), 1.0), CommError("stalled for 2.41 s"))
        post(self, error)

    monkeypatch.setattr(Agreement, "post_fault", late)
    mails[1].propose(CommError("stalled for 2.43 s"))
    until(lambda: all(mail.verdict for mail in mails))
    read = Agreement(store, place(1), 1.0).read_fault()
    assert {str(mail.verdict) for mail in mails} == {str(read)} == {"rank 0: stalled for 2.41 s"}
    assert mails[1].verdict_here is None


def test_the_rank_whose_proposal_counts_says_it_as_its_own(mails: list[WatchdogMail]) -> None:
    mails[1].propose(CommError("stalled for 2.43 s"))
    until(lambda: all(mail.verdict for mail in mails))
    assert str(mails[1].verdict_here) == "stalled for 2.43 s"
    assert mails[0].verdict_here is None
    assert str(mails[0].verdict) == "rank 1: stalled for 2.43 s"


class Exits:
    """A watchdog of rank 1 whose process does not really end."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.codes: list[int] = []
        self.told = threading.Event()
        self.may_end = threading.Event()
        monkeypatch.setattr(os, "_exit", self._exit)
        self.watchdog = Watchdog(store, place(1), TIMEOUT_S, ProgressBoard(), self._tell)

    def _tell(self, error: PacelineError) -> None:
        self.said.append(str(error))
        self.told.set()
        self.may_end.wait(20)

    def _exit(self, code: int) -> None:
        self.codes.append(code)
        self.watchdog._closed.set()  # ends the thread


def test_an_error_that_follows_from_the_verdict_is_not_shown_beside_it(
    store: Store, mails: list[WatchdogMail], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Exits(store, monkeypatch)
    mails[0].propose(CommError("rank 5 did not arrive"))
    assert ended.told.wait(20)
    returned = threading.Event()

    def leave() -> None:
        ended.watchdog.leaving(CommError("connection closed by peer"))
        returned.set()

    threading.Thread(target=leave, daemon=True).start()
    assert not returned.wait(0.3)  # the caller would go on and show its error
    ended.may_end.set()
    assert returned.wait(20)
    assert ended.codes == [CommError("").exit_code]
    assert ended.said == ["rank 0: rank 5 did not arrive"]


def test_nor_in_place_of_a_verdict_that_has_arrived_but_not_been_looked_at(
    store: Store, mails: list[WatchdogMail], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may be gone by then, and only this process knows the verdict."""
    look, may_look = Watchdog._look, threading.Event()

    def late(self: Watchdog) -> PacelineError | None:
        may_look.wait(20)
        return look(self)

    monkeypatch.setattr(Watchdog, "_look", late)
    ended = Exits(store, monkeypatch)
    ended.may_end.set()
    mails[0].propose(CommError("rank 5 did not arrive"))
    until(lambda: ended.watchdog._mail.verdict)
    threading.Timer(0.3, may_look.set).start()
    ended.watchdog.leaving(PeerError("connection closed by peer"))
    assert ended.said == ["rank 0: rank 5 did not arrive"]
    assert ended.codes == [CommError("").exit_code]


def test_a_rank_that_leaves_with_an_error_of_its_own_is_not_spoken_for(
    store: Store, mails: list[WatchdogMail], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Exits(store, monkeypatch)
    ended.may_end.set()
    ended.watchdog.leaving(CommError("its own"))
    mails[0].propose(CommError("rank 1 did not arrive"))
    until(lambda: ended.watchdog._mail.verdict)
    assert not ended.told.wait(1.0)
    ended.watchdog.close()
    assert (ended.said, ended.codes) == ([], [])
