"""`NvJpegHandles`: what nvJPEG needs to decode on one GPU.

In: the library and a sound file. Out: handles, and states to borrow, of which there are few: each has
memory and a dozen streams of its own, and one alone keeps the JPEG engines busy.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch

from paceline.data.on_device.batch_decoder import CHUNK
from paceline.data.on_device.jpeg_facts import JpegFile
from paceline.data.on_device.nvjpeg_library import NvJpegError, NvJpegLibrary
from paceline.data.stored_files import StoredFiles

# One decodes while the other's files are made ready.
_STATES = 2
# Room for images up to this, made at once.
_SIDE = 1280
_OTHER_GPU = 7


class NvJpegStates:
    """For one chunk at a time: a state for the engines' batches and one for single files."""

    def __init__(self, library: NvJpegLibrary, engine: int, cores: int) -> None:
        self._library = library
        self.batch = self.bitstream = self.single = 0
        with ExitStack() as undo:
            undo.callback(self.destroy)
            self.single = library.state(cores)
            if engine:
                self.batch = library.state(engine)
                library.make_room(engine, self.batch, CHUNK, _SIDE)
                self.bitstream = library.bitstream(engine)
            undo.pop_all()

    def destroy(self) -> None:
        for made in ({"state": self.batch}, {"state": self.single}, {"bitstream": self.bitstream}):
            with suppress(NvJpegError):  # it may have failed before
                self._library.destroy(**made)


class NvJpegHandles:
    """`engine` is 0 where the GPU has no JPEG engines, or they do not take even the sound file; `any` is
    either."""

    def __init__(self, library: NvJpegLibrary, device: torch.device, sound: JpegFile) -> None:
        """`device` is the current one."""
        self._library = library
        self._device = device
        # None stands for states that are to be made.
        self._idle: queue.LifoQueue[NvJpegStates | None] = queue.LifoQueue()
        for _ in range(_STATES):
            self._idle.put(None)
        self.engine = self.cores = 0
        with ExitStack() as undo:
            undo.callback(self.close)
            self.cores = library.handle("default")
            self._find_engine(sound)
            undo.pop_all()
        self.any = self.engine or self.cores

    def _find_engine(self, sound: JpegFile) -> None:
        try:
            self.engine = self._library.handle("hardware")
        except NvJpegError as error:
            if error.status != _OTHER_GPU:
                raise
            return
        stored = StoredFiles([sound.data])
        bitstream = self._library.bitstream(self.engine)
        try:
            takes = self._library.is_batched(self.engine, bitstream, *stored.pairs()[0])
        finally:
            self._library.destroy(bitstream=bitstream)
        if not takes:
            self._library.destroy(handle=self.engine)
            self.engine = 0

    @contextmanager
    def borrowed(self) -> Iterator[NvJpegStates]:
        """Waits for its turn. States with which something failed are not used again."""
        states, kept = self._idle.get(), None
        try:
            if states is None:
                states = NvJpegStates(self._library, self.engine, self.cores)
            yield states
            kept = states
        finally:
            self._idle.put(kept)
            if kept is None and states is not None:
                states.destroy()

    def close(self) -> None:
        """No chunk may be under way."""
        with self._current():
            while not self._idle.empty():
                states = self._idle.get()
                if states is not None:
                    states.destroy()
            for handle in (self.engine, self.cores):
                with suppress(NvJpegError):
                    self._library.destroy(handle=handle)

    def _current(self) -> AbstractContextManager[object]:
        """Who closes may have another device at hand."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
