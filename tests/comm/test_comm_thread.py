from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from paceline.comm.comm_thread import CommThread
from paceline.core.errors import CommError

CPU = torch.device("cpu")


def test_jobs_run_in_order_on_one_other_thread_and_nobody_waits() -> None:
    thread, seen, gate = CommThread(), [], threading.Event()

    def job(number: int) -> Tensor:
        gate.wait(10)
        seen.append((number, threading.current_thread().name))
        return torch.tensor(number)

    futures = [thread.submit(lambda n=n: job(n), CPU) for n in range(3)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert [int(future.wait()) for future in futures] == [0, 1, 2]
    assert seen == [(number, "paceline-comm") for number in range(3)]
    thread.close()
    with pytest.raises(CommError, match="has ended"):
        thread.submit(lambda: torch.ones(1), CPU)


def test_after_a_failure_every_job_fails_with_its_error() -> None:
    thread = CommThread()

    def broken() -> Tensor:
        raise CommError("the link is cut", "mend it")

    first = thread.submit(broken, CPU)
    second = thread.submit(lambda: torch.ones(1), CPU)
    for future in (first, second):
        with pytest.raises(Exception, match="the link is cut; mend it"):
            future.wait()
    thread.close()
