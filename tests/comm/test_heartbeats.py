"""However many ranks end at once, all of them print the same line, and each prints it once."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

import paceline.comm.heartbeats as heartbeats_module
import paceline.comm.watchdog as watchdog_module
from paceline.comm import PeerError
from paceline.comm.agreement import Agreement
from paceline.comm.heartbeats import HeartbeatChannel
from paceline.comm.progress import ProgressBoard
from paceline.comm.watchdog import Watchdog
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology

TIMEOUT_S = 600.0  # no rank of these tests waits, so it never runs out
PATIENCE_S = 100.0


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=PATIENCE_S))


def place(rank: int) -> Topology:
    return Topology(rank, 2, rank, 2, launcher="torchrun")


def read_key(rank: int) -> str:
    return f"paceline/watchdog/heard/{rank}"


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, "was not reached"
        time.sleep(0.01)


@pytest.fixture
def channels(store: Store) -> Iterator[list[HeartbeatChannel]]:
    both = [HeartbeatChannel(store, place(rank), 0.05) for rank in range(2)]
    yield both
    for channel in both:
        channel.close()


@pytest.fixture
def other(store: Store) -> Iterator[HeartbeatChannel]:
    """Rank 0's channel, without its watchdog."""
    channel = HeartbeatChannel(store, place(0), 0.05)
    yield channel
    channel.close()


def test_of_two_proposals_at_once_the_verdict_is_the_fault_that_others_read(
    store: Store, channels: list[HeartbeatChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's fault comes between rank 1's look at the faults and its own."""
    post = Agreement.post_fault

    def late(self: Agreement, error: PacelineError) -> None:
        if self._topology.rank == 1:
            post(Agreement(store, place(0), 1.0), CommError("stalled for 2.41 s"))
        post(self, error)

    monkeypatch.setattr(Agreement, "post_fault", late)
    channels[1].propose(CommError("stalled for 2.43 s"))
    until(lambda: all(channel.verdict for channel in channels))
    read = Agreement(store, place(1), 1.0).read_fault()
    assert (
        {str(channel.verdict) for channel in channels}
        == {str(read)}
        == {"rank 0: stalled for 2.41 s"}
    )
    assert channels[1].verdict_here is None


def test_the_rank_whose_proposal_counts_shows_it_as_its_own(
    channels: list[HeartbeatChannel],
) -> None:
    channels[1].propose(CommError("stalled for 2.43 s"))
    until(lambda: all(channel.verdict for channel in channels))
    assert str(channels[1].verdict_here) == "stalled for 2.43 s"
    assert channels[0].verdict_here is None
    assert str(channels[0].verdict) == "rank 1: stalled for 2.43 s"


class Exits:
    """A watchdog whose process does not really end."""

    def __init__(self, store: Store, rank: int = 1) -> None:
        self.shown_lines: list[str] = []
        self.codes: list[int] = []
        self.shown = threading.Event()
        self.may_end = threading.Event()
        self.watchdog = Watchdog(store, place(rank), TIMEOUT_S, ProgressBoard(), self._show)
        self.channel = self.watchdog._channel

    def _show(self, error: PacelineError) -> None:
        self.shown_lines.append(str(error))
        self.shown.set()
        self.may_end.wait(PATIENCE_S)

    def exit(self, code: int) -> None:
        self.watchdog._closed.set()  # ends the thread
        self.codes.append(code)  # last: tests wait for it


Start = Callable[..., Exits]


@pytest.fixture
def start(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts watchdogs whose threads end before `os._exit` is restored, also if a test fails."""
    made: list[Exits] = []
    monkeypatch.setattr(os, "_exit", lambda code: made[0].exit(code))
    # However short of cores the host is: the waits that are looked at here do not run out.
    monkeypatch.setattr(watchdog_module, "_SHOW_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(watchdog_module, "_LEAVE_S", PATIENCE_S)
    monkeypatch.setattr(heartbeats_module, "_END_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(watchdog_module, "_LONGEST_BEAT_S", 0.5)

    def begin(rank: int = 1) -> Exits:
        made.append(Exits(store, rank))
        return made[0]

    yield begin
    for ended in made:
        ended.may_end.set()
        ended.watchdog._closed.set()
        ended.watchdog._thread.join(PATIENCE_S)
        ended.channel.close()


def returned(call: Callable[[], object]) -> threading.Event:
    """Returns an event that is set once `call` has returned, when its caller would continue."""
    event = threading.Event()

    def run() -> None:
        call()
        event.set()

    threading.Thread(target=run, daemon=True).start()
    return event


@pytest.mark.parametrize(
    "call",
    [lambda w: w.leaving(CommError("connection closed by peer")), lambda w: w.close()],
    ids=["an error that follows from it", "a healthy end"],
)
def test_nothing_overtakes_a_verdict_that_is_being_shown(
    call: Callable[[Watchdog], None], start: Start, other: HeartbeatChannel
) -> None:
    ended = start()
    other.propose(CommError("rank 5 did not arrive"))
    assert ended.shown.wait(PATIENCE_S)
    over = returned(lambda: call(ended.watchdog))
    assert not over.wait(0.8)
    ended.may_end.set()
    assert over.wait(PATIENCE_S)
    assert ended.codes == [CommError("").exit_code]
    assert ended.shown_lines == ["rank 0: rank 5 did not arrive"]


@pytest.fixture
def may_check(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that watchdogs wait for before they check anything."""
    check, may_check = Watchdog._check, threading.Event()

    def late(self: Watchdog) -> PacelineError | None:
        may_check.wait(PATIENCE_S)
        return check(self)

    monkeypatch.setattr(Watchdog, "_check", late)
    return may_check


def test_nor_in_place_of_a_verdict_that_has_arrived_but_not_been_looked_at(
    may_check: threading.Event, start: Start, other: HeartbeatChannel
) -> None:
    """The store may be gone by then, and only this process knows the verdict."""
    ended = start()
    ended.may_end.set()
    other.propose(CommError("rank 5 did not arrive"))
    until(lambda: ended.channel.verdict)
    threading.Timer(0.3, may_check.set).start()
    ended.watchdog.leaving(PeerError("connection closed by peer"))
    assert ended.shown_lines == ["rank 0: rank 5 did not arrive"]
    assert ended.codes == [CommError("").exit_code]


def test_an_error_of_its_own_is_shown_whatever_the_verdict(
    may_check: threading.Event, start: Start, other: HeartbeatChannel
) -> None:
    ended = start()
    other.propose(CommError("rank 1 did not arrive"))
    until(lambda: ended.channel.verdict)
    assert returned(lambda: ended.watchdog.leaving(CommError("no space left"))).wait(PATIENCE_S)
    may_check.set()
    assert not ended.shown.wait(0.8)
    assert not ended.watchdog._may_end(CommError("a verdict that was looked up just before"))
    ended.watchdog.close()
    assert not ended.watchdog._may_end(CommError("a verdict after the healthy end"))
    assert (ended.shown_lines, ended.codes) == ([], [])


def test_the_stores_host_stays_until_the_others_have_read_the_verdict(
    store: Store, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(watchdog_module, "_LINGER_S", PATIENCE_S)
    ended = start(0)
    ended.may_end.set()
    ended.channel.propose(CommError("rank 5 did not arrive"))
    assert ended.shown.wait(PATIENCE_S)
    time.sleep(0.3)
    assert ended.codes == []
    store.set(read_key(1), "")
    until(lambda: ended.codes)


@pytest.mark.parametrize("state", ["slow", "gone", "left"])
def test_a_stop_signal_ends_a_wait_only_where_a_rank_has_fallen_silent(
    store: Store, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is merely slow may be saving, and is waited for as before; one that has left the job
    is silent because it has ended. The clock and the beats are
    made here: on a busy host a thread that lives may be silent for longer than three beats."""
    proposed: list[str] = []
    monkeypatch.setattr(
        HeartbeatChannel, "propose", lambda self, error: proposed.append(str(error))
    )
    board = ProgressBoard()
    watchdog = Watchdog(store, place(1), 600.0, board)
    watchdog.close()
    watchdog.asked_to_stop = lambda: True
    channel = watchdog._channel
    with board.during("an all-reduce"):
        for second in range(60):
            watchdog._now_s, channel.answers = float(second), second
            if channel.reads_progress:
                beat = second if state == "slow" else 0
                channel.left = {0} if state == "left" else set()
                channel.heartbeats = {0: (beat, board.progress), 1: (second, board.progress)}
            assert watchdog._check() is None
    assert bool(proposed) == (state == "gone")
    assert all("rank 0 gives no sign of life" in line for line in proposed)


def test_ranks_that_leave_because_of_a_lost_one_are_not_taken_for_lost(store: Store) -> None:
    """Connections break one after the other: for the last rank to notice, the other ranks have left."""
    places = [Topology(rank, 4, rank, 4, launcher="torchrun") for rank in range(4)]
    lost, *others = [HeartbeatChannel(store, rank, 0.05) for rank in places]
    lost.close()
    for channel in others:
        channel._calls_roll = True
        until(
            lambda channel=channel: channel.unanswered == {0}
        )  # as soon as the others have answered
        assert channel.silent_ranks() == {0}
        channel.close()


def test_a_stop_that_one_rank_announces_reaches_the_others_without_being_asked_for(
    store: Store, channels: list[HeartbeatChannel]
) -> None:
    assert not channels[1].stop_announced
    Agreement(store, place(0), 1.0).announce_stop()
    until(lambda: all(channel.stop_announced for channel in channels))


def test_a_reader_of_many_ranks_names_the_silent_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats_module, "_READERS", 1)
    ended: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, error: ended.append(str(error)))
    places = [Topology(rank, 3, rank, 3, launcher="torchrun") for rank in range(3)]
    silent = HeartbeatChannel(store, places[2], 0.05)
    boards = [ProgressBoard(), ProgressBoard()]
    watchdogs = [Watchdog(store, places[n], 6.0, boards[n]) for n in range(2)]
    silent.close()
    with boards[0].during("an all-reduce"), boards[1].during("an all-reduce"):
        until(lambda: len(ended) >= 2)
    # On a busy host the other rank may be late too.
    pattern = re.compile(r"ranks? (\d and )?2 gives? no sign of life")
    assert all(pattern.search(line) for line in ended), ended
    for watchdog in watchdogs:
        watchdog.close()
