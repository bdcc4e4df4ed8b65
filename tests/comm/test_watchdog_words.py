"""What the watchdog says of a stall: pure functions of standings."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.progress_board import ProgressBoard, Standing
from paceline.comm.rank_hosts import RankHost, RankHosts
from paceline.comm.watchdog_words import BufferWords, size, stall_error, unreachable_error

BUFFERS = [
    BufferWords(3 << 20, "ring", ("d.weight", "d.bias", "c.weight", "c.bias", "b.weight")),
    BufferWords(2048, "hierarchical", ("a.weight",)),
]


def test_the_rank_that_did_not_arrive_is_named_with_the_buffer() -> None:
    standings = {
        0: Standing(step=6, begun=1, ended=0),
        1: Standing(step=6, begun=1, ended=0, call="all-reduce", calls=40),
        2: Standing(step=6, computes=True),
    }
    error = stall_error(standings, (), BUFFERS, 24.0, 30.0)
    assert str(error) == (
        "step 7: the exchange of buffer 1 of 2 (3 MiB, ring: d.weight, d.bias, c.weight and 2 more) "
        "stalled for 24 s: rank 2 did not arrive (computing step 7); look into rank 2's log and "
        "host; comm.timeout_s = 30 sets the wait; go on with --resume auto"
    )
    assert error.exit_code == 1


def test_a_rank_that_is_ahead_does_not_hide_the_place() -> None:
    """Rank 1 has ended the first buffer; what it waits for is the one that stalls it."""
    standings = {0: Standing(step=3, begun=1, ended=0), 1: Standing(step=3, begun=2, ended=1)}
    text = str(stall_error(standings, (), BUFFERS, 3.0, 4.0))
    assert text.startswith("step 4: the exchange of buffer 1 of 2 (")
    assert "all ranks are in it, and the network does not carry it to its end" in text


def test_what_a_silent_rank_said_long_ago_does_not_tell_the_place() -> None:
    standings = {0: Standing(step=5, begun=2, ended=1), 1: Standing(step=3, begun=1, ended=0)}
    text = str(stall_error(standings, {1}, BUFFERS, 3.0, 4.0))
    assert text.startswith("step 6: the exchange of buffer 2 of 2 (")
    assert (
        "stalled for 3 s: rank 1 gives no sign of life (last seen in buffer 1 of step 4); " in text
    )


def test_a_silent_rank_is_named_though_it_had_arrived() -> None:
    standings = {0: Standing(step=0, begun=2, ended=1), 1: Standing(step=0, begun=2, ended=1)}
    text = str(stall_error(standings, {1}, BUFFERS, 3.0, 4.0))
    assert "buffer 2 of 2 (2 KiB, hierarchical: a.weight)" in text
    assert "rank 1 gives no sign of life (last seen in buffer 2 of step 1)" in text


def test_a_collective_of_the_group_is_named_by_itself() -> None:
    standings = {
        0: Standing(step=9, calls=5, call="gather"),
        1: Standing(step=9, calls=4),
        2: Standing(step=9, calls=4),
    }
    text = str(stall_error(standings, {2}, BUFFERS, 3.0, 4.0))
    assert text.startswith(
        "gather stalled for 3 s: rank 2 gives no sign of life (last seen after step 10); "
    )
    assert "rank 1 did not arrive (after step 10)" in text


def test_many_ranks_stay_one_readable_line() -> None:
    standings = {rank: Standing(step=1, computes=True) for rank in range(1, 100)}
    text = str(stall_error({0: Standing(step=1, begun=1)} | standings, (), BUFFERS, 3.0, 4.0))
    assert "rank 8 did not arrive" in text
    assert "91 more ranks likewise" in text
    assert "rank 9 " not in text
    assert "\n" not in text


def test_a_host_that_does_not_answer() -> None:
    text = str(unreachable_error(Standing(step=2, begun=1), 3, "10.0.0.1", 8.0, closed=False))
    assert text.startswith(
        "rank 3, in buffer 1 of step 3: rank 0's host (10.0.0.1) has not answered for 8 s; "
    )
    assert "has been gone" in str(unreachable_error(Standing(), 3, "h", 8.0, closed=True))


A, B, C = (RankHost(f"node{n}", f"10.0.0.{n}") for n in (1, 2, 3))
HOSTS = RankHosts([A, A, B, B, C, C])


def test_who_gives_no_sign_of_life_comes_before_who_is_only_slower() -> None:
    """A link is cut during an evaluation that takes rank 0 longest."""
    standings = {rank: Standing(step=9, calls=4) for rank in range(6)}
    standings[4] = Standing(step=9, calls=5, call="all-reduce")
    text = str(stall_error(standings, {3}, BUFFERS, 3.0, 4.0, HOSTS))
    assert "s: rank 3 on node2 (10.0.0.2) gives no sign of life" in text
    assert text.index("rank 3 on") < text.index("rank 0 on node1 (10.0.0.1) did not arrive")
    assert "look into rank 3's log and host, and the network to it" in text


def test_a_host_that_vanished_is_named_with_its_ranks() -> None:
    standings = {rank: Standing(step=2, begun=1) for rank in range(6)}
    text = str(stall_error(standings, {2, 3, 5}, BUFFERS, 3.0, 4.0, HOSTS))
    assert "host node2 (10.0.0.2) with ranks 2 and 3 gives no sign of life" in text
    assert "rank 5 on node3 (10.0.0.3) gives no sign of life" in text


def test_a_rank_that_lost_rank_0_says_which_hosts_it_still_reaches() -> None:
    def said(reached: list[RankHost] | None, closed: bool = False) -> str:
        standing = Standing(step=2, begun=1)
        return str(unreachable_error(standing, 3, "10.0.0.1", 8.0, closed, HOSTS, reached))

    assert said([C]).startswith(
        "rank 3 on node2 (10.0.0.2), in buffer 1 of step 3: rank 0's host node1 (10.0.0.1) has not "
        "answered for 8 s, though node3 (10.0.0.3) can be reached; that host has ended"
    )
    assert "; this host node2 (10.0.0.2) is cut off the network; " in said([])
    assert "; it or this host has ended or is cut off the network; " in said(None)
    assert "is cut off the network; go" in said([], closed=True)
    assert "; this host" not in said([], closed=True)


def test_hosts_that_answer_are_found_though_nothing_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = socket.create_connection

    def connect_unless_lost(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "192.0.2.1":
            raise TimeoutError
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", connect_unless_lost)
    here = RankHost("here", "127.0.0.1")
    hosts = RankHosts([A, here, RankHost("lost", "192.0.2.1"), RankHost("near", "127.0.0.2")])
    assert hosts.others_that_answer(1, 1) == [RankHost("near", "127.0.0.2")]
    assert RankHosts([A, here]).others_that_answer(1, 1) is None
    assert RankHosts().others_that_answer(1, 1) is None


def test_a_broken_connection_names_the_host_at_its_other_end() -> None:
    assert RankHosts([A, B]).gone_text("10.0.0.2") == "rank 1 on node2 (10.0.0.2) is gone"
    assert (
        HOSTS.gone_text("10.0.0.2") == "host node2 (10.0.0.2) or one of its ranks 2 and 3 is gone"
    )
    assert not HOSTS.gone_text("10.0.0.9")
    assert not RankHosts([A, A]).gone_text("10.0.0.1"), "one host need not be named"


@pytest.mark.parametrize(
    ("amount", "words"),
    [(0, "0 bytes"), (1 << 10, "1 KiB"), (25 << 20, "25 MiB"), (3 << 30, "3 GiB")],
)
def test_sizes(amount: int, words: str) -> None:
    assert size(amount) == words


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1),
    st.booleans(),
)
def test_whoever_is_said_to_be_absent_is_behind_somebody(
    places: list[tuple[int, int, int]], in_exchange: bool
) -> None:
    standings = {
        rank: Standing(step, max(begun, ended), min(begun, ended), calls=begun, call="gather")
        for rank, (step, begun, ended) in enumerate(places)
    }
    if in_exchange:
        standings[len(places)] = Standing(4, 1, 0)
    text = str(stall_error(standings, (), BUFFERS, 3.0, 4.0))
    for rank, standing in standings.items():
        if f"rank {rank} did not arrive" in text:
            assert any(
                (s.step, s.ended) >= (standing.step, standing.begun) or s.calls > standing.calls
                for s in standings.values()
            )


def test_the_board_follows_an_exchange_and_keeps_what_broke() -> None:
    board = ProgressBoard()
    assert board.standing.doing == "before the first step"
    board.step_begun(4)
    assert (board.standing.waits, board.standing.doing) == (False, "computing step 5")
    board.sent(0)
    board.begun(0)
    assert (board.standing.waits, board.standing.doing) == (True, "in buffer 1 of step 5")
    board.ended(0)
    board.step_ended(0.1)
    assert (board.standing.waits, board.standing.doing) == (False, "after step 5")
    with board.during("gather"):
        assert (board.standing.doing, board.standing.calls) == ("in gather", 1)
    with pytest.raises(OSError, match="lost"), board.during("broadcast"):
        raise OSError("lost")
    assert (board.standing.doing, board.standing.calls) == ("in broadcast", 2)
    assert Standing.from_text(board.standing.to_text()) == board.standing
