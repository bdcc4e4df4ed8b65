"""`Prefetcher`: work done ahead of its use, by a bounded number of threads, with results in order.

A job consists of independent chunks. Results come out in the order of the jobs, whatever order the
threads finish in, and an error inside a chunk is raised where the result of its job is due. Each
chunk reports the time that it spends in each stage (read, decode, augment), by which a wait for a
batch is attributed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Part = TypeVar("Part")
# Below this a chunk costs more to hand out than it saves; above it, one thread keeps others waiting.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 8, 64
# The stage of a wait for work that reported none.
_OTHER_STAGE = "other"
_AHEAD_PER_WORKER = 4


class Stopped(Exception):  # noqa: N818  (nothing went wrong)
    """Raised inside a chunk whose result nobody wants any more."""


class Progress:
    """What a chunk is given while it runs: whether to stop, and where to report its time."""

    def __init__(self, stopping: threading.Event | None = None) -> None:
        self._stopping = stopping
        self.spent: dict[str, float] = {}

    def check(self) -> None:
        """Raises `Stopped` once nobody wants the result; called between samples."""
        if self._stopping is not None and self._stopping.is_set():
            raise Stopped

    def add(self, stage: str, seconds: float) -> None:
        self.spent[stage] = self.spent.get(stage, 0.0) + seconds


@dataclass(frozen=True)
class Job(Generic[Part, Result]):
    """`chunks` may run concurrently. `complete` runs after the last of them, in the same thread;
    `finish` makes the result out of their parts, in the consumer's thread."""

    chunks: Sequence[Callable[[Progress], Part]]
    finish: Callable[[list[Part]], Result]
    complete: Callable[[], None] | None = None


class _Countdown:
    """Counts the chunks of a job that are still to be done."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


_Running = tuple[Job[Part, Result], list[Future[tuple[Part, dict[str, float]]]]]


class Prefetcher(Generic[Part, Result]):
    """With 0 workers the consumer does each job when it asks for it."""

    def __init__(self, jobs: Iterator[Job[Part, Result]], workers: int, depth: int) -> None:
        """At most `depth` jobs are under way, or done and waiting. `spent` is the time by stage,
        over all threads, of the job whose result came last."""
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
                left = _Countdown(len(job.chunks))
                return self._finish(job, [self._run(job, chunk, left) for chunk in job.chunks])
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
            self._require_open()  # closed by another thread: what was under way is no error
            # Whoever iterates to the end, or into an error, leaves no thread behind.
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
            left = _Countdown(len(job.chunks))
            futures = [pool.submit(self._run, job, chunk, left) for chunk in job.chunks]
            self._waiting.append((job, futures))

    def _run(
        self, job: Job[Part, Result], chunk: Callable[[Progress], Part], left: _Countdown
    ) -> tuple[Part, dict[str, float]]:
        progress = Progress(self._stopping)
        progress.check()
        part = chunk(progress)
        if left.is_last() and job.complete is not None:
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
        # Jobs refer to their loader: without this it would live on, with all it holds, until some cyclic
        # garbage collection, at any moment and in any thread.
        self._jobs = iter(())

    def close(self) -> None:
        """Returns once no thread is left; each finishes the samples that it has in hand and no
        more."""
        self._stopping.set()
        self._shut_down()

    def __enter__(self) -> Prefetcher[Part, Result]:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def map_ahead(
    work: Callable[[Argument], Part], arguments: Iterable[Argument], workers: int
) -> Generator[Part, None, None]:
    """`map(work, arguments)`, with a bounded number of results made ahead by threads."""

    def job(argument: Argument) -> Job[Part, Part]:
        return Job([lambda progress: work(argument)], lambda parts: parts[0])

    jobs = (job(argument) for argument in arguments)
    with Prefetcher(jobs, workers, _AHEAD_PER_WORKER * workers) as results:
        yield from results


def cut(length: int, workers: int) -> list[tuple[int, int]]:
    """Chunks of a batch of `length`: about one a worker, neither tiny nor huge."""
    wanted = -(-length // max(1, workers))
    size = min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def sum_by_stage(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, over all parts."""
    total: dict[str, float] = {}
    for part in parts:
        for stage, seconds in part.items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def divide_wait(wait_s: float, spent: Mapping[str, float]) -> dict[str, float]:
    """A wait for a batch, divided among the stages in proportion to the time they took to make it."""
    whole = sum(spent.values())
    if wait_s <= 0:
        return {}
    if whole <= 0:
        return {_OTHER_STAGE: wait_s}
    return {stage: wait_s * seconds / whole for stage, seconds in spent.items() if seconds > 0}
