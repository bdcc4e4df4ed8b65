"""Groups that lose ranks: the others meet again, in place, and sum correctly."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lost_ranks import run_members
from paceline.comm import CommSettings, Group
from paceline.comm.peer_errors import LostMemberError, PeerError
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology

ELASTIC = CommSettings(timeout_s=60.0, rendezvous_timeout_s=60.0, min_ranks=1)
CPU = torch.device("cpu")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def joined(timeout_s: float = 60.0) -> Group:
    settings = replace(ELASTIC, timeout_s=timeout_s)
    return Group(Topology.from_env(os.environ), settings, CPU, elastic=True)


def _sums(rank: int, deaths: dict[int, str], how: str) -> list[tuple[int, int, float]]:
    """Sums ones until the end; `deaths` names the ranks that end themselves, and where."""
    found = []
    with joined() as group:
        turn = 0
        while turn < 6:
            try:
                if deaths.get(rank) == f"before {turn}":
                    _die()
                if how == "agree":
                    group.agree(f"turn {turn}")
                if how == "computing" and turn == 2 and rank == 1:
                    time.sleep(
                        0.3
                    )  # the others wait for a rank that is alive but does not take part
                ones = torch.ones(1000)
                group.all_reduce_sum(ones)
                turn += 1
                continue
            except LostMemberError:
                pass
            while True:
                if deaths.get(rank) == "regroup":
                    _die()
                try:
                    group.regroup()
                    agreed = torch.tensor([float(turn)])
                    group.broadcast(agreed)
                    break
                except LostMemberError:
                    continue
            turn = int(agreed)
            generation = group.generation
            assert generation is not None
            ones = torch.ones(1000)
            found.append((generation.number, group.world_size, float(turn)))
            assert generation.members[group.rank] == rank
    return found


@pytest.mark.parametrize(
    ("size", "deaths", "how"),
    [
        (2, {1: "before 2"}, "plain"),
        (4, {2: "before 2"}, "plain"),
        (4, {3: "before 2"}, "agree"),
        (4, {2: "before 2"}, "computing"),
        (4, {1: "before 1", 2: "before 3"}, "plain"),
        (4, {1: "before 2", 3: "before 2"}, "plain"),
        (4, {1: "before 2", 2: "regroup"}, "plain"),
        (8, {7: "before 1", 3: "regroup", 4: "before 4"}, "agree"),
    ],
)
def test_survivors_meet_again(size: int, deaths: dict[int, str], how: str, tmp_path: Path) -> None:
    results = run_members(size, _sums, tmp_path, deaths, how)
    assert sorted(results) == sorted(set(range(size)) - deaths.keys())
    for found in results.values():
        assert found[-1][1] == size - len(deaths)
        assert found == results[0]


def _stopped(rank: int, how: str) -> list[int]:
    with joined(8.0) as group:
        group.all_reduce_sum(torch.ones(1))
        if rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            time.sleep(200)  # its watchdog still answers
        with pytest.raises(LostMemberError):
            group.all_reduce_sum(torch.ones(1))
        group.regroup()
        ones = torch.ones(1)
        group.all_reduce_sum(ones)
        return [group.rank, int(ones)]


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_a_rank_that_does_not_arrive_is_given_up(how: str, tmp_path: Path) -> None:
    assert run_members(3, _stopped, tmp_path, how) == {0: [0, 2], 2: [1, 2]}


def _threads_left(rank: int) -> list[str]:
    with joined() as group:
        group.all_reduce_sum(torch.ones(1))
        names = [thread.name for thread in threading.enumerate()]
        assert "paceline-losses" in names
    return [thread.name for thread in threading.enumerate() if thread.name == "paceline-losses"]


def test_no_thread_waits_for_losses_after_the_end(tmp_path: Path) -> None:
    """Such a wait can end while the interpreter exits, which aborts the process."""
    assert run_members(2, _threads_left, tmp_path) == {0: [], 1: []}


def _without_first(rank: int) -> str:
    with joined() as group:
        group.all_reduce_sum(torch.ones(1))
        if rank == 0:
            _die()
        with pytest.raises(LostMemberError):
            group.all_reduce_sum(torch.ones(1))
        with pytest.raises(PeerError) as caught:
            group.regroup()
        return str(caught.value)


def test_rank_zero_cannot_be_lost(tmp_path: Path) -> None:
    for line in run_members(3, _without_first, tmp_path).values():
        assert "rank 0 ended" in line


def test_a_launcher_without_a_supervisor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError) as caught:
        joined()
    assert caught.value.field == "comm.min_ranks"


def test_a_wait_that_gloo_never_ends_ends_after_a_loss() -> None:
    """A message to a lost rank can stay under way until the group's time-out."""
    reports = iter([False, False, True])

    class Work:
        def wait(self, limit: object = None) -> None:
            assert limit is not None, "it would wait for ever"
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    group = Group.__new__(Group)
    group.backend = "gloo"
    generations = SimpleNamespace(lost_within=lambda limit_s: next(reports))
    group._members = SimpleNamespace(generations=generations)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="timed out"):
        group.await_work(Work())
    assert next(reports, None) is None
