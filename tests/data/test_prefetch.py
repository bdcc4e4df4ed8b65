from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.cause_clock import CauseClock
from paceline.data.prefetch import Check, Job, Prefetcher, Stopped, cut

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


class Work:
    """Jobs 0, 1, 2 … of three chunks each; later chunks finish first."""

    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count = count
        self.fail_at = fail_at
        self.handed_out = 0
        self.done = 0

    def jobs(self) -> Iterator[Job[int, list[int]]]:
        for number in range(self.count):
            self.handed_out += 1
            yield Job([self.chunk(number, part) for part in range(3)], list)

    def chunk(self, number: int, part: int) -> Callable[[Check], int]:
        def run(check: Check) -> int:
            check()
            if number == self.fail_at and part == 1:
                raise DataError(f"job {number}")
            time.sleep(0.001 * (2 - part))
            self.done += 1
            return 10 * number + part

        return run


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_order(workers: int) -> None:
    results = list(Prefetcher(Work(12).jobs(), workers, depth=3))
    assert results == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(12)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_stays_the_end(workers: int) -> None:
    prefetcher = Prefetcher(Work(1).jobs(), workers, depth=3)
    assert len(list(prefetcher)) == 1
    assert list(prefetcher) == []


def test_works_ahead_but_not_too_far() -> None:
    work = Work(50)
    with Prefetcher(work.jobs(), workers=2, depth=4) as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + 10
        while work.done < 15 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert work.done == 15  # the one taken, and four more
        assert work.handed_out == 5


def test_without_workers_nothing_is_done_ahead() -> None:
    work = Work(50)
    with Prefetcher(work.jobs(), workers=0, depth=4) as prefetcher:
        next(prefetcher)
        assert work.done == 3


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_where_its_result_was_due(workers: int) -> None:
    prefetcher = Prefetcher(Work(9, fail_at=4).jobs(), workers, depth=3)
    assert [next(prefetcher)[0] for _ in range(4)] == [0, 10, 20, 30]
    with pytest.raises(DataError, match="job 4"):
        next(prefetcher)
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)


def test_closing_in_the_middle_is_prompt() -> None:
    started = threading.Barrier(3)
    outcome: list[str] = []

    def endless(check: Check) -> int:
        started.wait(10)
        try:
            while True:
                check()
                time.sleep(0.002)
        except Stopped:
            outcome.append("stopped")
            raise

    jobs = iter([Job([endless] * 3, list) for _ in range(5)])
    prefetcher: Prefetcher[int, list[int]] = Prefetcher(jobs, workers=2, depth=4)
    consumer_error: list[Exception] = []

    def consume() -> None:
        try:
            next(prefetcher)
        except RuntimeError as error:
            consumer_error.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    started.wait(10)
    prefetcher.close()
    consumer.join(10)
    assert not consumer.is_alive()
    assert outcome == ["stopped", "stopped"]
    assert [str(error) for error in consumer_error] == ["the loader is closed"]
    prefetcher.close()


@given(st.integers(1, 5000), st.integers(0, 64))
def test_cuts_cover_a_batch_once(length: int, workers: int) -> None:
    pieces = cut(length, workers)
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(length))
    assert all(stop - start <= 64 for start, stop in pieces)


def test_cuts_by_hand() -> None:
    assert cut(20, 4) == [(0, 8), (8, 16), (16, 20)]
    assert cut(64, 2) == [(0, 32), (32, 64)]
    assert len(cut(256, 1)) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_job_took_is_told_with_its_result(workers: int) -> None:
    clock = CauseClock()

    def chunk(number: int) -> Callable[[Check], int]:
        def run(check: Check) -> int:
            clock.add("read", 1.0)
            clock.add("decode", number)
            return number

        return run

    jobs = iter([Job([chunk(1), chunk(2)], sum), Job([chunk(5)], sum)])
    with Prefetcher(jobs, workers, 2, clock) as prefetcher:
        assert next(prefetcher) == 3
        assert prefetcher.spent == {"read": 2.0, "decode": 3.0}
        assert next(prefetcher) == 5
        assert prefetcher.spent == {"read": 1.0, "decode": 5.0}
