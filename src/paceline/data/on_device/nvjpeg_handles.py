"""`NvJpegHandles`: what nvJPEG needs to decode on one GPU.

In: the library. Out: handles, and states to borrow, of which there are few: each has a dozen streams of
its own, and streams beyond the GPU's connections queue up behind one another, the training's behind
theirs (see connections.py).
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.data.on_device.nvjpeg_library import NvJpegError, NvJpegLibrary

# One decodes while the other's files are made ready.
_STATES = 2
_OTHER_GPU = 7


class NvJpegStates:
    """For one chunk at a time: a state for the engines' batches and one for single files."""

    def __init__(self, library: NvJpegLibrary, engine: int, cores: int) -> None:
        self.batch = library.state(engine) if engine else 0
        self.bitstream = library.bitstream(engine) if engine else 0
        self.single = library.state(cores)


class NvJpegHandles:
    """On the current device. `engine` is 0 where the GPU has no JPEG engines, `any` is either."""

    def __init__(self, library: NvJpegLibrary) -> None:
        self._library = library
        # None stands for states that are to be made.
        self._idle: queue.LifoQueue[NvJpegStates | None] = queue.LifoQueue()
        for _ in range(_STATES):
            self._idle.put(None)
        self.cores = library.handle("default")
        try:
            self.engine = library.handle("hardware")
        except NvJpegError as error:
            if error.status != _OTHER_GPU:
                raise
            self.engine = 0
        self.any = self.engine or self.cores

    @contextmanager
    def borrowed(self) -> Iterator[NvJpegStates]:
        """Waits for its turn. States with which something failed are not used again."""
        states = self._idle.get()
        try:
            if states is None:
                states = NvJpegStates(self._library, self.engine, self.cores)
            yield states
        except BaseException:
            if states is not None:
                self._drop(states)
            self._idle.put(None)
            raise
        self._idle.put(states)

    def _drop(self, states: NvJpegStates) -> None:
        with suppress(NvJpegError):  # they failed before
            self._library.destroy(state=states.batch, bitstream=states.bitstream)
            self._library.destroy(state=states.single)

    def close(self) -> None:
        """No chunk may be under way."""
        while not self._idle.empty():
            states = self._idle.get()
            if states is not None:
                self._drop(states)
        with suppress(NvJpegError):
            self._library.destroy(handle=self.engine)
            self._library.destroy(handle=self.cores)
