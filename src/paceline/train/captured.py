"""`Captured`: a sequence of GPU work, recorded once and replayed.

In: a function without arguments that reads and writes fixed memory. Out: the same effect with one launch
in place of hundreds. The first calls run as they are: they compile kernels and choose algorithms,
which a recording cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import RunError

WARM_CALLS = 2
_LOCK_WAIT_S = 1.0


class Captured:
    """With `enabled` False it is the plain function. Recordings that never run at the same time, and hand
    each other nothing, may share a `pool` of memory."""

    def __init__(
        self,
        function: Callable[[], None],
        *,
        enabled: bool,
        pool: Any = None,
    ) -> None:
        self._function = function
        self._pool = pool
        self._left = WARM_CALLS if enabled else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lock = threading.Lock()

    @property
    def replays(self) -> bool:
        """Whether the next call runs no Python of the function."""
        return self._graph is not None

    @property
    def records(self) -> bool:
        """Whether the next call records, so that until its end nothing has really run."""
        return self._graph is None and self._left == 0

    def __call__(self) -> None:
        if self._graph is not None or self._left == 0:
            with self._lock:
                self._graph = self._graph or self._record()
                self._graph.replay()
        else:
            self._left -= 1 if self._left > 0 else 0
            self._function()

    def release(self) -> None:
        """Destroys the CUDA graph; later calls run the plain function.

        A graph that holds NCCL kernels keeps a reference to its communicator, and destroying a
        communicator waits for these references: graphs go first (pytorch/pytorch#115388). Does not wait
        for a graph that still runs: CUDA frees it when it ends.
        """
        # Another thread may release while this rank's own replays: CUDA graphs are not thread-safe.
        if not self._lock.acquire(timeout=_LOCK_WAIT_S):
            return
        try:
            if self._graph is not None:
                self._graph.reset()
                self._graph = None
            self._left = -1
        finally:
            self._lock.release()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls belong to the recording: a loader's thread may copy meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._function()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RunError(
                f"the step could not be recorded as a CUDA graph ({reason})",
                "use --set run.cuda_graphs=off",
            ) from error
        return graph
