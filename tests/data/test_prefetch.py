from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.core.errors import DataError
from paceline.data import divide_wait, sum_by_stage
from paceline.data.prefetch import Job, Prefetcher, Progress, Stopped, map_ahead

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

    def chunk(self, number: int, part: int) -> Callable[[Progress], int]:
        def run(progress: Progress) -> int:
            progress.check()
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


def test_works_ahead_but_not_too_far() -> None:
    work = Work(50)
    with Prefetcher(work.jobs(), workers=2, depth=4) as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + 100
        while work.done < 15 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert work.done == 15  # the one taken, and four more
        assert work.handed_out == 5


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

    def endless(progress: Progress) -> int:
        started.wait(100)
        try:
            while True:
                progress.check()
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
    started.wait(100)
    prefetcher.close()
    consumer.join(100)
    assert not consumer.is_alive()
    assert outcome == ["stopped", "stopped"]
    assert [str(error) for error in consumer_error] == ["the loader is closed"]
    prefetcher.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_time_by_stage_comes_with_the_result(workers: int) -> None:
    def chunk(number: int) -> Callable[[Progress], int]:
        def run(progress: Progress) -> int:
            progress.add("read", 1.0)
            progress.add("decode", number)
            return number

        return run

    jobs = iter([Job([chunk(1), chunk(2)], sum), Job([chunk(5)], sum)])
    with Prefetcher(jobs, workers, 2) as prefetcher:
        assert next(prefetcher) == 3
        assert prefetcher.spent == {"read": 2.0, "decode": 3.0}
        assert next(prefetcher) == 5
        assert prefetcher.spent == {"read": 1.0, "decode": 5.0}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_job_is_completed_once_after_all_of_its_chunks_and_before_its_result(
    workers: int,
) -> None:
    done: list[object] = []

    def jobs() -> Iterator[Job[int, list[object]]]:
        for number in range(5):
            chunks = [
                lambda progress, n=number, part=part: done.append((n, part)) for part in range(3)
            ]

            def complete(number: int = number) -> None:
                assert {part for n, part in done if n == number} == {0, 1, 2}
                done.append((number, "complete"))

            yield Job(chunks, lambda parts, number=number: (number, "complete") in done, complete)

    assert list(Prefetcher(jobs(), workers, depth=2)) == [True] * 5
    assert len(done) == 20


@pytest.mark.parametrize("workers", [0, 3])
def test_map_ahead_is_map_with_bounded_work(workers: int) -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        time.sleep(0.001 * (number % 3))
        return number * number

    assert list(map_ahead(work, range(40), workers)) == [n * n for n in range(40)]
    begun.clear()
    results = map_ahead(work, iter(range(10**9)), workers)
    assert next(results) == 0
    results.close()
    assert len(begun) <= 4 * workers + 1


def test_a_wait_is_divided_as_the_work_was() -> None:
    shares = divide_wait(0.3, {"read": 1.0, "decode": 2.0, "copy": 0.0})
    assert shares == {"read": pytest.approx(0.1), "decode": pytest.approx(0.2)}
    assert divide_wait(0.3, {}) == {"other": 0.3}
    assert divide_wait(0.0, {"read": 1.0}) == {}
    assert sum_by_stage({"read": 1.0}, {}, {"read": 2.0, "copy": 3.0}) == {"read": 3, "copy": 3}
