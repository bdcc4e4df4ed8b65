"""Work shared out among threads, its results in order.

In: a function and its arguments. Out: the results as a plain `map` would give them, a bounded number of
them made ahead, which is all the memory that is spent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")
# Results under way for each thread, finished or not.
_AHEAD = 4


def in_order(
    work: Callable[[A], R], arguments: Iterable[A], workers: int
) -> Generator[R, None, None]:
    """Without workers the caller does the work. Closing it drops what has not begun."""
    if workers < 1:
        yield from map(work, arguments)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="paceline-data-work")
    try:
        for argument in arguments:
            waiting.append(pool.submit(work, argument))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
