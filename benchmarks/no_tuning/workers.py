"""Worker processes that train the runs of a queue."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.no_tuning.runs import Cell, train


class Job(NamedTuple):
    """What all runs have in common.

    Attributes:
        data: The folder of the subsets.
        device: `cpu` or `cuda`.
        settings: Settings of all runs.
    """

    data: Path
    device: str
    settings: dict[str, Any]


def _work(jobs: Any, results: Any, job: Job) -> None:
    """Trains the runs of the queue `jobs` until it yields None."""
    import torch

    torch.set_num_threads(1)
    while (table := jobs.get()) is not None:
        results.put(train(Cell.of(table), job.data, job.device, job.settings))


def finish(
    cells: Sequence[Cell], job: Job, workers: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields the JSON line of each run.

    Args:
        cells: The runs.
        job: What all runs have in common.
        workers: Number of processes, with one CPU thread each.
        seconds: No run starts after this time.
    """
    began = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    jobs: Any = context.Queue()
    results: Any = context.Queue()
    processes = [context.Process(target=_work, args=(jobs, results, job)) for _ in range(workers)]
    for process in processes:
        process.start()
    waiting = [vars(cell) for cell in reversed(cells)]
    running = 0
    try:
        while True:
            in_time = time.perf_counter() - began < seconds
            while waiting and in_time and running < workers:
                jobs.put(waiting.pop())
                running += 1
            if not running:
                return
            try:
                yield results.get(timeout=1)
                running -= 1
            except queue.Empty:
                if not all(process.is_alive() for process in processes):
                    raise RuntimeError("a worker has died: see its message above") from None
    finally:
        for _ in processes:
            jobs.put(None)
        for process in processes:
            process.join(10)
            process.kill()
