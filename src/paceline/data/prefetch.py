"""`Prefetcher`: makes batches in threads before they are needed, and yields them in order.

A `Job`, such as making one batch, consists of independent functions, its chunks. Results have the
order of the jobs, even if threads finish in another order. If a chunk fails, its error is raised in
place of the job's result. Each chunk records the seconds that it spends on reading, decoding and
augmenting, so that a wait for a batch can be explained.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Part = TypeVar("Part")
# Limits of the samples per chunk. With smaller chunks, the overhead exceeds the gain. With larger
# chunks, other threads wait for the last one.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 8, 64
# Stage to which `divide_wait` attributes a wait if no stage recorded a time.
_OTHER_STAGE = "other"
_AHEAD_PER_WORKER = 4


class Stopped(Exception):  # noqa: N818  (not an error)
    """Raised in a thread whose result is no longer needed."""


class Progress:
    """Tells a running function when to stop, and records the seconds of reading, decoding and so on."""

    def __init__(self, stopping: threading.Event | None = None) -> None:
        self._stopping = stopping
        self.spent: dict[str, float] = {}

    def check(self) -> None:
        """Raises `Stopped` if the result is no longer needed. Threads call this between samples."""
        if self._stopping is not None and self._stopping.is_set():
            raise Stopped

    def add(self, stage: str, seconds: float) -> None:
        self.spent[stage] = self.spent.get(stage, 0.0) + seconds


@dataclass(frozen=True)
class Job(Generic[Part, Result]):
    """Work, such as making one batch, that is divided among threads.

    Attributes:
        chunks: The functions to run, in any order or concurrently.
        finish: Makes the result of the job from the results of the chunks, in the consumer's
            thread.
        complete: Runs after all chunks, in the thread that finished the last one.
    """

    chunks: Sequence[Callable[[Progress], Part]]
    finish: Callable[[list[Part]], Result]
    complete: Callable[[], None] | None = None


_Running = tuple[Job[Part, Result], list[Future[tuple[Part, dict[str, float]]]]]


class Closing(ABC):
    """A context manager that calls `close` at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class Prefetcher(Closing, Generic[Part, Result]):
    """Runs jobs in threads ahead of the consumer, and iterates over their results in order.

    Attributes:
        spent: Seconds that making the latest result took for reading, decoding and augmenting,
            summed over threads.
    """

    def __init__(self, jobs: Iterator[Job[Part, Result]], workers: int, depth: int) -> None:
        """Creates a prefetcher.

        Args:
            jobs: The jobs. The consumer's thread iterates over them.
            workers: Number of threads. With 0, the consumer's thread runs each job on demand.
            depth: Maximum number of jobs that are running or have a result that was not taken yet.
        """
        self.spent: dict[str, float] = {}
        self._jobs = jobs
        self._depth = depth
        self._waiting: deque[_Running[Part, Result]] = deque()
        self._stopping = threading.Event()
        self._pool = (
            ThreadPoolExecutor(workers, thread_name_prefix="paceline-data") if workers else None
        )

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        self._require_open()
        try:
            if self._pool is None:
                job = next(self._jobs)
                done = itertools.count(1)
                return self._finish(job, [self._run(job, chunk, done) for chunk in job.chunks])
            self._fill(self._pool)
            if not self._waiting:
                raise StopIteration
            job, futures = self._waiting.popleft()
            parts = [future.result() for future in futures]
            self._fill(self._pool)
            return self._finish(job, parts)
        except StopIteration:
            self._shut_down()
            raise
        except Exception:
            self._require_open()  # errors after `close` in another thread are not reported
            self.close()
            raise

    def _require_open(self) -> None:
        if self._stopping.is_set():
            raise RuntimeError("the loader is closed")

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while len(self._waiting) < self._depth:
            job = next(self._jobs, None)
            if job is None:
                return
            done = itertools.count(1)
            futures = [pool.submit(self._run, job, chunk, done) for chunk in job.chunks]
            self._waiting.append((job, futures))

    def _run(
        self, job: Job[Part, Result], chunk: Callable[[Progress], Part], done: Iterator[int]
    ) -> tuple[Part, dict[str, float]]:
        """Runs one function of a job. `done` counts the finished ones; `next(done)` is atomic."""
        progress = Progress(self._stopping)
        progress.check()
        part = chunk(progress)
        if next(done) == len(job.chunks) and job.complete is not None:
            progress.check()
            job.complete()
        return part, progress.spent

    def _finish(self, job: Job[Part, Result], parts: list[tuple[Part, dict[str, float]]]) -> Result:
        self.spent = sum_by_stage(*(spent for _, spent in parts))
        return job.finish([part for part, _ in parts])

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        # Jobs refer to their loader. This breaks the cycle, so that the loader is freed at once.
        self._jobs = iter(())

    def close(self) -> None:
        """Stops every thread after its current sample, and waits for all threads to end."""
        self._stopping.set()
        self._shut_down()


def map_ahead(
    work: Callable[[Argument], Part], arguments: Iterable[Argument], workers: int
) -> Generator[Part, None, None]:
    """Yields the results of `map(work, arguments)`; threads compute them ahead of the consumer."""

    def job(argument: Argument) -> Job[Part, Part]:
        return Job([lambda progress: work(argument)], lambda parts: parts[0])

    jobs = (job(argument) for argument in arguments)
    with Prefetcher(jobs, workers, _AHEAD_PER_WORKER * workers) as results:
        yield from results


def cut(length: int, workers: int) -> list[tuple[int, int]]:
    """Divides `length` samples into parts of 8 to 64 samples, one per worker thread if possible.

    Returns:
        For each part, the index of its first sample and the index after its last one.
    """
    wanted = -(-length // max(1, workers))
    size = min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def sum_by_stage(*parts: Mapping[str, float]) -> dict[str, float]:
    """Adds up several dicts of seconds by name."""
    total: dict[str, float] = {}
    for part in parts:
        for stage, seconds in part.items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def divide_wait(wait_s: float, spent: Mapping[str, float]) -> dict[str, float]:
    """Divides the wait for a batch among reading, decoding and augmenting.

    Args:
        wait_s: Seconds that the consumer waited.
        spent: Seconds that making the batch took for reading, decoding and augmenting, by name.

    Returns:
        The seconds of the wait for each name, in proportion to `spent`.
    """
    whole = sum(spent.values())
    if wait_s <= 0:
        return {}
    if whole <= 0:
        return {_OTHER_STAGE: wait_s}
    return {stage: wait_s * seconds / whole for stage, seconds in spent.items() if seconds > 0}
