"""`CommThread`: the one thread of a process that runs collectives beside the backward pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paceline.core.errors import CommError

_END_WAIT_S = 5.0


@dataclass
class _Job:
    run: Callable[[], Tensor]
    future: Future[Any]
    device: torch.device
    ready: torch.cuda.Event | None


class CommThread:
    """Runs jobs in the order in which they were submitted.

    Submitting never waits. After a job has failed the ranks are no longer in step, so every later job
    fails with its error. The thread starts with the first job, and is a daemon, so that a stuck
    collective cannot keep the process alive.
    """

    def __init__(self, name: str = "paceline-comm") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, run: Callable[[], Tensor], device: torch.device) -> Future[Any]:
        """Runs `run` after all earlier jobs; the future holds its result, or its error."""
        if self._closed:
            raise CommError("the communication thread has ended", "submit before close()")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        ready = None
        if device.type == "cuda":
            # What the caller's stream still computes must be complete before the job reads it.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(device))
        future: Future[Any] = Future(devices=[device] if ready else None)
        self._jobs.put(_Job(run, future, device, ready))
        # An error must be raised in a callback: the C++ side of DDP sees it only from there.
        return future.then(_value)

    @property
    def failure(self) -> BaseException | None:
        """The error of the first job that failed."""
        return self._failure

    def close(self) -> None:
        """Runs what was submitted, then ends the thread; waits for seconds at most."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END_WAIT_S)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.ready is None:
                job.future.set_result(self._outcome(job))
                continue
            stream = self._stream(job.device)
            with torch.cuda.device(job.device), torch.cuda.stream(stream):
                stream.wait_event(job.ready)
                # The future records this stream, and whoever waits for it waits for the stream.
                job.future.set_result(self._outcome(job))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """One side stream for each device, so that its exchanges stay in order."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _outcome(self, job: _Job) -> Tensor | BaseException:
        if self._failure is None:
            try:
                return job.run()
            except Exception as error:  # noqa: BLE001  (raised where the future is read)
                self._failure = error
        return self._failure


def _value(future: Future[Any]) -> Tensor:
    outcome = future.value()
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, Tensor)
    return outcome
