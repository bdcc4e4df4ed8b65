"""Reports about stalls: pure functions of the ranks' progress."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from paceline.comm.job import RankHost, RankHosts, format_ranks, post_hosts
from paceline.comm.progress import (
    BucketInfo,
    ProgressBoard,
    RankProgress,
)
from paceline.comm.stalls import stall_error

BUCKETS = [
    BucketInfo(3 << 20, "ring", ("d.weight", "d.bias", "c.weight", "c.bias", "b.weight")),
    BucketInfo(2048, "hierarchical", ("a.weight",)),
]
A, B, C = (RankHost(f"node{n}", f"10.0.0.{n}") for n in (1, 2, 3))
HOSTS = RankHosts([A, A, B, B, C, C])


def stall(
    progress: Mapping[int, RankProgress],
    silent: Collection[int] = (),
    hosts: RankHosts = HOSTS,
) -> str:
    return str(stall_error(progress, silent, BUCKETS, 24.0, 30.0, hosts))


def test_the_rank_that_did_not_arrive_is_named_with_the_bucket() -> None:
    progress = {
        0: RankProgress(step=6, begun=1, ended=0),
        1: RankProgress(step=6, begun=1, ended=0, call="all-reduce", calls=40),
        2: RankProgress(step=6, computes=True),
    }
    text = stall(progress)
    for part in (
        "step 7: ",
        "bucket 1 of 2",
        "rank 2 on node2 (10.0.0.2) did not arrive",
        "comm.timeout_s = 30",
    ):
        assert part in text
    assert "rank 1 on node1 (10.0.0.1) did not" not in text


@pytest.mark.parametrize(("step", "begun"), [(3, 1), (5, 2)], ids=["behind", "arrived"])
def test_a_silent_rank_is_named_wherever_it_was_last_seen(step: int, begun: int) -> None:
    last = RankProgress(step=step, begun=begun, ended=begun - 1)
    text = stall({0: RankProgress(step=5, begun=2, ended=1), 1: last}, {1})
    assert "bucket 2 of 2" in text
    assert "rank 1 on node1 (10.0.0.1) gives no sign of life" in text


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1),
    st.booleans(),
)
def test_every_absent_rank_is_behind_another(
    places: list[tuple[int, int, int]], in_exchange: bool
) -> None:
    progress = {
        rank: RankProgress(step, max(begun, ended), min(begun, ended), calls=begun, call="gather")
        for rank, (step, begun, ended) in enumerate(places)
    }
    if in_exchange:
        progress[len(places)] = RankProgress(4, 1, 0)
    text = stall(progress, hosts=RankHosts())
    for rank, own in progress.items():
        if f"rank {rank} did not arrive" in text:
            assert any(
                (s.step, s.ended) >= (own.step, own.begun) or s.calls > own.calls
                for s in progress.values()
            )


def test_the_board_follows_an_exchange_and_keeps_the_call_that_broke() -> None:
    board = ProgressBoard()

    def now() -> tuple[bool, str]:
        return board.progress.waits, board.progress.doing

    assert now() == (False, "before the first step")
    board.step_begun(4)
    assert now() == (False, "computing step 5")
    board.sent(0)
    board.begun(0)
    assert now() == (True, "in bucket 1 of step 5")
    board.ended(0)
    board.step_ended(0.1)
    assert now() == (False, "after step 5")
    with board.during("gather"):
        assert (now(), board.progress.calls) == ((True, "in gather"), 1)
    with pytest.raises(OSError, match="lost"), board.during("broadcast"):
        raise OSError("lost")
    assert (now(), board.progress.calls) == ((True, "in broadcast"), 2)
    assert RankProgress.from_text(board.progress.to_text()) == board.progress


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 5], "ranks 1, 5"),
        ([4, 5, 6], "ranks 4 to 6"),
        ([0, 4, 5, 6, 9], "ranks 0, 4 to 6, 9"),
        (range(0, 2000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (1000 in all)"),
    ],
)
def test_ranks_are_named_in_runs_and_cut_short(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_hosts_are_posted_once_a_host() -> None:
    store = HashStore()
    assert not RankHosts.posted(store)
    post_hosts(store, {rank: [A, A, B, C][rank] for rank in (2, 0, 1, 3)})
    assert RankHosts.read(store).whole_hosts(range(3)) == {A: [0, 1]}
    assert RankHosts.read(store).of(3) == C
