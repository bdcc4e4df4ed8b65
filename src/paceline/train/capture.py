"""`Captured`: a sequence of GPU work, captured once as a CUDA graph and replayed.

The captured function takes no arguments and reads and writes fixed memory; a replay has the same effect
with one launch in place of hundreds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import RunError

# The first calls run the function itself: they compile kernels and choose algorithms, which a capture
# cannot do.
WARM_CALLS = 2
_LOCK_WAIT_S = 1.0


class Captured:
    """With `enabled` False it is the plain function. Graphs that never run at the same time, and pass
    each other no data in their own memory, may share a memory `pool`."""

    def __init__(
        self,
        function: Callable[[], None],
        *,
        enabled: bool,
        pool: Any = None,
    ) -> None:
        self._function = function
        self._pool = pool
        self._warm_calls_left = WARM_CALLS if enabled else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lock = threading.Lock()

    @property
    def replays(self) -> bool:
        """Whether the next call runs no Python of the function."""
        return self._graph is not None

    @property
    def captures(self) -> bool:
        """Whether the next call captures, so that nothing runs on the device until the capture ends."""
        return self._graph is None and self._warm_calls_left == 0

    def __call__(self) -> None:
        if self._graph is not None or self._warm_calls_left == 0:
            with self._lock:
                self._graph = self._graph or self._capture()
                self._graph.replay()
        else:
            self._warm_calls_left -= 1 if self._warm_calls_left > 0 else 0
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
            self._warm_calls_left = -1
        finally:
            self._lock.release()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls are captured: a loader's thread may copy meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._function()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RunError(
                f"the step could not be captured as a CUDA graph ({reason})",
                "use --set run.cuda_graphs=off",
            ) from error
        return graph
