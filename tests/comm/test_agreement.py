"""Agreement over the store: all ranks succeed, or all raise the same error."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta

import pytest

from paceline.comm import AgreedError
from paceline.comm.agreement import ActiveClock, Agreement
from paceline.comm.rendezvous import meet
from paceline.core.errors import ConfigError, DataError
from paceline.core.topology import Topology
from ranks import run_ranks


def joined(timeout_s: float = 100.0) -> Agreement:
    topology = Topology.from_env(os.environ)
    return Agreement(meet(topology, 100.0).store, topology, timeout_s)


def raised(agreement: Agreement, phase: str, **given: object) -> AgreedError:
    with pytest.raises(AgreedError) as caught:
        agreement.agree(phase, **given)  # type: ignore[arg-type]
    return caught.value


def _phases(rank: int) -> tuple[str, int, str, str]:
    agreement = joined()
    agreement.agree("fine", facts={"seed": 1})
    error = raised(agreement, "data", error=DataError("no images", "check x") if rank else None)
    facts = raised(agreement, "facts", facts={"seed": 1, "lr": 0.1 + rank})
    if rank == 1:
        agreement.post_fault(ConfigError("optim.lr", 0, "too small"))
        agreement.post_fault(DataError("a later one"))
    fault = agreement.read_fault(wait_s=100)
    agreement.leave(100.0)  # the store must outlive the slower reader
    return str(error), error.exit_code, str(facts), f"{fault} ({fault and fault.exit_code})"


def test_errors_differences_and_faults_of_one_rank_reach_all() -> None:
    first, second = run_ranks(2, _phases)
    assert first == second
    error, code, facts, fault = first
    assert (error, code) == ("rank 1: no images; check x", 1)
    assert "ranks differ in lr: 0.1 on rank 0, 1.1 on rank 1" in facts
    assert fault == "rank 1: optim.lr = 0: too small (2)", "the first one posted"


def _odd_one(rank: int, odd: int, first: int) -> str:
    """Rank `first` comes before all others."""
    agreement = joined()
    if rank != first:
        time.sleep(0.3)
    # NaN is equal to NaN here.
    facts = {"seed": float("nan"), "lr": 0.5 if rank == odd else 0.1}
    error = str(raised(agreement, "facts", facts=facts))
    agreement.leave(100.0)
    return error


@pytest.mark.parametrize(("odd", "first"), [(0, 1), (2, 0), (2, 2)])
def test_rank_0_is_compared_with_the_lowest_rank_that_differs(odd: int, first: int) -> None:
    (line,) = set(run_ranks(3, _odd_one, odd, first))
    values = "0.5 on rank 0, 0.1 on rank 1" if odd == 0 else "0.1 on rank 0, 0.5 on rank 2"
    assert line.startswith(f"ranks differ in lr: {values}; ")


def _two_fail(rank: int) -> str:
    agreement = joined()
    error = raised(agreement, "data", error=DataError(f"{rank} images") if rank else None)
    agreement.leave(100.0)
    return str(error)


def test_of_several_failed_ranks_the_lowest_is_named() -> None:
    assert set(run_ranks(3, _two_fail)) == {"rank 1: 1 images"}


def _used_twice(rank: int) -> str:
    agreement = joined()
    agreement.agree("again", facts={"step": 1})
    error = raised(agreement, "again", error=DataError("worn out") if rank else None)
    agreement.leave(100.0)
    return str(error)


def test_a_phase_may_come_again() -> None:
    assert set(run_ranks(2, _used_twice)) == {"rank 1: worn out"}


def _missing(rank: int, posts: bool) -> str:
    agreement = joined()
    agreement.agree("start")
    if not posts:
        agreement._timeout_s = 1.0
    if rank == 1:
        if posts:
            agreement.post_fault(DataError("out of memory", "free some"))
            agreement.leave(0.1)
        return ""
    return str(raised(agreement, "model"))


@pytest.mark.parametrize(
    ("posts", "message"),
    [
        (True, "rank 1: out of memory; free some"),
        (False, "rank 1 did not reach 'model' within 1 s"),
    ],
)
def test_a_rank_that_failed_or_does_not_come_is_named(posts: bool, message: str) -> None:
    assert message in run_ranks(2, _missing, posts)[0]


class JustTooLate:
    """A store to which another rank writes the verdict, and then its fault, right after the first
    wait for it."""

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise RuntimeError("timed out")

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return self.checks > 1

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.get(key)

    def get(self, key: str) -> bytes:
        report = {"error": "ranks differ", "code": 2}
        return json.dumps(report if "/verdict/" in key else report | {"rank": 0}).encode()

    checks = 0


def test_a_verdict_counts_before_the_fault_that_follows_from_it() -> None:
    agreement = Agreement(JustTooLate(), Topology(rank=1, world_size=2), 5.0)  # type: ignore[arg-type]
    assert str(raised(agreement, "configuration")) == "ranks differ"


def test_the_clock_hardly_counts_the_time_in_which_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = ActiveClock(longest_s=2.0)
    for _ in range(3):
        now[0] += 0.5
        clock.now_s()
    assert clock.now_s() == 1.5
    now[0] += 60
    assert clock.now_s() == 3.5


def test_the_clock_ticks_beside_a_call_that_blocks() -> None:
    ticks = threading.Semaphore(0)

    class Counting(ActiveClock):
        def now_s(self) -> float:
            ticks.release()
            return super().now_s()

    with Counting(longest_s=0.05).ticking():
        for _ in range(5):
            assert ticks.acquire(timeout=100)
