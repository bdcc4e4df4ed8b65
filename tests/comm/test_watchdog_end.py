"""However ranks end at once, all of them say the same one line, and each says it once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import Store, TCPStore

import paceline.comm.watchdog as watchdog_module
import paceline.comm.watchdog_mail as mail_module
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


def heard(rank: int) -> str:
    return f"paceline/watchdog/heard/{rank}"


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


@pytest.fixture
def other(store: Store) -> Iterator[WatchdogMail]:
    """Rank 0's, without its watchdog."""
    mail = WatchdogMail(store, place(0), 0.05)
    yield mail
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
    """A watchdog whose process does not really end."""

    def __init__(self, store: Store, rank: int = 1) -> None:
        self.said: list[str] = []
        self.codes: list[int] = []
        self.told = threading.Event()
        self.may_end = threading.Event()
        self._store = store
        self.heard_at_exit = False
        self.watchdog = Watchdog(store, place(rank), TIMEOUT_S, ProgressBoard(), self._tell)
        self.mail = self.watchdog._mail

    def _tell(self, error: PacelineError) -> None:
        self.said.append(str(error))
        self.told.set()
        self.may_end.wait(20)

    def exit(self, code: int) -> None:
        self.codes.append(code)
        self.heard_at_exit = self._store.check([heard(1)])
        self.watchdog._closed.set()  # ends the thread


Start = Callable[..., Exits]


@pytest.fixture
def start(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Threads end before `os._exit` is the real one again, also where a test fails."""
    made: list[Exits] = []
    monkeypatch.setattr(os, "_exit", lambda code: made[0].exit(code))
    # However short of cores the host is: the waits that are looked at here do not run out.
    monkeypatch.setattr(watchdog_module, "_LAST_WORDS_S", 20.0)
    monkeypatch.setattr(mail_module, "_END_WAIT_S", 20.0)

    def begin(rank: int = 1) -> Exits:
        made.append(Exits(store, rank))
        return made[0]

    yield begin
    for ended in made:
        ended.may_end.set()
        ended.watchdog._closed.set()
        ended.watchdog._thread.join(20)
        ended.mail.close()


def left(ended: Exits, error: PacelineError) -> threading.Event:
    """Set once `leaving` has returned; its caller would go on and show the error."""
    returned = threading.Event()

    def leave() -> None:
        ended.watchdog.leaving(error)
        returned.set()

    threading.Thread(target=leave, daemon=True).start()
    return returned


def test_an_error_that_follows_from_the_verdict_is_not_shown_beside_it(
    start: Start, other: WatchdogMail
) -> None:
    ended = start()
    other.propose(CommError("rank 5 did not arrive"))
    assert ended.told.wait(20)
    returned = left(ended, CommError("connection closed by peer"))
    assert not returned.wait(0.3)
    ended.may_end.set()
    assert returned.wait(20)
    assert ended.codes == [CommError("").exit_code]
    assert ended.said == ["rank 0: rank 5 did not arrive"]


def test_nor_does_a_healthy_end_overtake_it(start: Start, other: WatchdogMail) -> None:
    ended = start()
    other.propose(CommError("rank 5 did not arrive"))
    assert ended.told.wait(20)
    closed = threading.Event()

    def close() -> None:
        ended.watchdog.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert not closed.wait(1.0)
    ended.may_end.set()
    assert closed.wait(20)
    assert ended.codes == [CommError("").exit_code]


@pytest.fixture
def may_look(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Watchdogs look at nothing before this is set."""
    look, may_look = Watchdog._look, threading.Event()

    def late(self: Watchdog) -> PacelineError | None:
        may_look.wait(20)
        return look(self)

    monkeypatch.setattr(Watchdog, "_look", late)
    return may_look


def test_nor_in_place_of_a_verdict_that_has_arrived_but_not_been_looked_at(
    may_look: threading.Event, start: Start, other: WatchdogMail
) -> None:
    """The store may be gone by then, and only this process knows the verdict."""
    ended = start()
    ended.may_end.set()
    other.propose(CommError("rank 5 did not arrive"))
    until(lambda: ended.mail.verdict)
    threading.Timer(0.3, may_look.set).start()
    ended.watchdog.leaving(PeerError("connection closed by peer"))
    assert ended.said == ["rank 0: rank 5 did not arrive"]
    assert ended.codes == [CommError("").exit_code]


def test_an_error_of_its_own_is_shown_whatever_the_verdict(
    may_look: threading.Event, start: Start, other: WatchdogMail
) -> None:
    ended = start()
    other.propose(CommError("rank 1 did not arrive"))
    until(lambda: ended.mail.verdict)
    assert left(ended, CommError("no space left")).wait(20)
    may_look.set()
    assert not ended.told.wait(1.0)
    assert not ended.watchdog._may_end(CommError("a verdict that was looked up just before"))
    ended.watchdog.close()
    assert (ended.said, ended.codes) == ([], [])


def test_a_rank_that_has_left_is_not_ended() -> None:
    ended = Watchdog.__new__(Watchdog)
    ended._end_lock, ended._closed = threading.Lock(), threading.Event()
    ended._leaving, ended._ends = None, False
    assert ended._may_end(CommError("verdict"))
    ended._closed.set()
    assert not ended._may_end(CommError("verdict"))


class Watched:
    """A store that tells when a rank says that it has heard the verdict."""

    def __init__(self, store: Store, at_heard: Callable[[], object]) -> None:
        self._store, self._at_heard = store, at_heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if "/heard/" in key:
            self._at_heard()
        self._store.set(key, value)


def test_a_rank_says_that_it_has_heard_once_it_knows_the_verdict(
    store: Store, mails: list[WatchdogMail]
) -> None:
    """The store's host may go as soon as all have said so."""
    known: list[bool] = []
    late = mails[1]
    late._store = Watched(late._store, lambda: known.append(late.verdict is not None))  # type: ignore[assignment]
    mails[0].propose(CommError("rank 5 did not arrive"))
    until(lambda: store.check([heard(0), heard(1)]))
    assert known == [True]


def test_the_stores_host_stays_until_the_others_have_heard(
    store: Store, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(watchdog_module, "_LINGER_S", 20.0)
    ended = start(0)
    ended.may_end.set()
    ended.mail.propose(CommError("rank 5 did not arrive"))
    assert ended.told.wait(20)
    time.sleep(0.3)
    assert ended.codes == []
    store.set(heard(1), "")
    until(lambda: ended.codes)


def test_a_rank_ends_only_after_it_has_said_so(start: Start, other: WatchdogMail) -> None:
    ended = start()
    ended.may_end.set()
    store = ended.mail._store
    # As slow as on a loaded host: the watchdog is about to end the process by then.
    slow = Watched(store, lambda: (ended.told.wait(20), time.sleep(0.2)))
    ended.mail._store = slow  # type: ignore[assignment]
    other.propose(CommError("rank 5 did not arrive"))
    until(lambda: ended.codes)
    assert ended.heard_at_exit


@pytest.mark.parametrize("alive", [True, False], ids=["slow", "gone"])
def test_a_stop_signal_ends_a_wait_only_where_a_rank_has_fallen_silent(
    store: Store, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is merely slow may be saving, and is waited for as before."""
    monkeypatch.setattr(watchdog_module, "_STOP_WAIT_S", 0.6)
    monkeypatch.setattr(watchdog_module, "_LONGEST_BEAT_S", 0.1)
    ended: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, error: ended.append(str(error)))
    other = WatchdogMail(store, place(0), 0.1)
    board = ProgressBoard()
    watchdog = Watchdog(store, place(1), 600.0, board)
    watchdog.asked_to_stop = lambda: True
    if not alive:
        other.close()
    with board.during("an all-reduce"):
        deadline = time.monotonic() + (2.0 if alive else 20.0)
        while time.monotonic() < deadline and not ended:
            time.sleep(0.02)
    assert bool(ended) == (not alive)
    assert all("rank 0 gives no sign of life" in line for line in ended)
    other.close()
    watchdog.close()


def test_ranks_are_silent_only_once_their_heartbeat_stops(mails: list[WatchdogMail]) -> None:
    assert mails[1].silent_ranks(lambda: False) == set()
    mails[0].close()
    assert mails[1].silent_ranks(lambda: False) == {0}
    assert mails[1].silent_ranks(lambda: True) == set()
