"""`Prefetcher`: work done ahead of its use, by a bounded number of threads, in order.

In: an iterator of jobs, each of independent chunks. Out: their results one by one, in the order of the
jobs, however the threads ran. An error inside a chunk surfaces where its job's result was due.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.data.cause_clock import CauseClock, added

Result = TypeVar("Result")
Part = TypeVar("Part")
Check = Callable[[], None]
_Timed = tuple[Part, dict[str, float]]
# Below this a chunk costs more to hand out than it saves; above it, one thread keeps others waiting.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 8, 64


class Stopped(Exception):  # noqa: N818  (nothing went wrong)
    """Raised inside a chunk whose result nobody wants any more."""


@dataclass(frozen=True)
class Job(Generic[Part, Result]):
    """`chunks` may run at the same time; `finish` puts their parts together, in the consumer.

    A chunk gets a function to call between samples: it raises once nobody wants the result.
    """

    chunks: Sequence[Callable[[Check], Part]]
    finish: Callable[[list[Part]], Result]


class Prefetcher(Generic[Part, Result]):
    """With 0 workers the consumer does each job when it asks for it."""

    def __init__(
        self,
        jobs: Iterator[Job[Part, Result]],
        workers: int,
        depth: int,
        clock: CauseClock | None = None,
    ) -> None:
        """`depth` jobs at most are under way or done and waiting. Chunks may tell `clock` what their time
        goes into; `spent` is then that of the job whose result came last."""
        self._clock = clock or CauseClock()
        self.spent: dict[str, float] = {}
        self._jobs = jobs
        self._depth = depth
        self._waiting: deque[tuple[Job[Part, Result], list[Future[_Timed[Part]]]]] = deque()
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
                return self._finish(job, [self._run(chunk) for chunk in job.chunks])
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
            self._waiting.append((job, [pool.submit(self._run, chunk) for chunk in job.chunks]))

    def _run(self, chunk: Callable[[Check], Part]) -> _Timed[Part]:
        self._check()
        self._clock.take()  # what a chunk that failed left behind
        part = chunk(self._check)
        return part, self._clock.take()

    def _finish(self, job: Job[Part, Result], parts: list[_Timed[Part]]) -> Result:
        self.spent = added(*(spent for _, spent in parts))
        return job.finish([part for part, _ in parts])

    def _check(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        # Jobs know their loader: without this it would live on, with all it holds, until some cyclic
        # garbage collection, at any moment and in any thread.
        self._jobs = iter(())

    def close(self) -> None:
        """Returns once no thread is left; each finishes what it has in hand and no more."""
        self._stopping.set()
        self._shut_down()

    def __enter__(self) -> Prefetcher[Part, Result]:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def cut(length: int, workers: int) -> list[tuple[int, int]]:
    """Chunks of a batch of `length`: about one a worker, neither tiny nor huge."""
    wanted = -(-length // max(1, workers))
    size = min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    return [(start, min(start + size, length)) for start in range(0, length, size)]
