"""`NvJpegLibrary` calls NVIDIA's nvJPEG; `NvJpegHandles` manages its handles and decoder states.

torchvision also calls nvJPEG, but reads files from pageable memory and makes one call at a time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import queue
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.decode.library import StoredFiles

# One row per image: addresses of up to four planes, then the bytes per line in each plane.
Targets = npt.NDArray[np.uint64]
_PLANES = 4
_RGB = 3
_FULL_COLOUR = 0
_BACKENDS = {"hardware": 3, "default": 0}
# Files per call. More files keep the GPU's JPEG engines busier. With fewer files, reading for the next
# call starts sooner.
CHUNK = 64
# Number of `NvJpegStates`. One decodes while a thread prepares files for the other.
_STATES = 2
# Memory for images with sides of at most this many pixels is allocated in advance.
_SIDE = 1280
_OTHER_GPU = 7
_FUNCTIONS = (
    "nvjpegCreateEx", "nvjpegDestroy", "nvjpegJpegStateCreate", "nvjpegJpegStateDestroy",
    "nvjpegJpegStreamCreate", "nvjpegJpegStreamDestroy", "nvjpegGetProperty", "nvjpegGetImageInfo",
    "nvjpegJpegStreamParseHeader", "nvjpegDecodeBatchedSupported", "nvjpegDecodeBatchedInitialize",
    "nvjpegDecodeBatched", "nvjpegDecodeBatchedPreAllocate", "nvjpegDecode",
)  # fmt: skip
_STATUS = {
    1: "not initialised", 2: "invalid parameter", 3: "bad JPEG", 4: "not supported",
    5: "allocation failed", 6: "execution failed", 7: "not for this GPU", 8: "internal error",
    9: "not implemented", 10: "incomplete",
}  # fmt: skip


class NvJpegError(RuntimeError):
    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: {_STATUS.get(status, 'unknown status')} ({status})")
        self.status = status


class NvJpegLibrary:
    """Calls the functions of nvJPEG. Threads may share handles, but not states and bitstreams.

    The constructor raises OSError if the library cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # CDLL releases the interpreter lock, which takes longer than a short call. PyDLL keeps the lock.
        self._long, self._short = ctypes.CDLL(path), ctypes.PyDLL(path)
        missing = [name for name in _FUNCTIONS if not hasattr(self._long, name)]
        if missing:
            raise OSError(f"{path} has no {missing[0]}")

    def version(self) -> str:
        numbers = []
        for kind in range(3):
            value = ctypes.c_int()
            self._call("nvjpegGetProperty", kind, ctypes.byref(value))
            numbers.append(str(value.value))
        return ".".join(numbers)

    def handle(self, backend: str) -> int:
        """Creates a handle on the current device.

        Raises:
            NvJpegError: If the backend does not work. Status 7 means that the GPU has no JPEG
                engines.
        """
        return self._new("nvjpegCreateEx", _BACKENDS[backend], None, None, 0)

    def state(self, handle: int) -> int:
        return self._new("nvjpegJpegStateCreate", _pointer(handle))

    def bitstream(self, handle: int) -> int:
        return self._new("nvjpegJpegStreamCreate", _pointer(handle))

    def destroy(self, *, handle: int = 0, state: int = 0, bitstream: int = 0) -> None:
        for name, value in (
            ("nvjpegJpegStreamDestroy", bitstream),
            ("nvjpegJpegStateDestroy", state),
            ("nvjpegDestroy", handle),
        ):
            if value:
                self._call(name, _pointer(value), long=True)

    def size(self, handle: int, address: int, length: int) -> tuple[int, int]:
        """Returns the width and height of the image that nvJPEG will write for a file."""
        components, sampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * _PLANES)(), (ctypes.c_int * _PLANES)()
        self._call(
            "nvjpegGetImageInfo", _pointer(handle), _pointer(address), ctypes.c_size_t(length),
            ctypes.byref(components), ctypes.byref(sampling), widths, heights,
        )  # fmt: skip
        return widths[0], heights[0]

    def is_batched(self, handle: int, bitstream: int, address: int, length: int) -> bool:
        """Returns True if the GPU's JPEG engines can decode the file as part of a batch."""
        no = ctypes.c_int(1)
        self._call(
            "nvjpegJpegStreamParseHeader", _pointer(handle), _pointer(address),
            ctypes.c_size_t(length), _pointer(bitstream),
        )  # fmt: skip
        self._call(
            "nvjpegDecodeBatchedSupported", _pointer(handle), _pointer(bitstream), ctypes.byref(no)
        )
        return no.value == 0

    def preallocate(self, handle: int, state: int, count: int, side: int) -> None:
        """Allocates memory with which the engines decode `count` images of `side` × `side` at a time.

        For more or larger images, decoding first waits until the GPU is idle and then allocates
        more.
        """
        self._call(
            "nvjpegDecodeBatchedPreAllocate", _pointer(handle), _pointer(state), count, side, side,
            _FULL_COLOUR, _RGB, long=True,
        )  # fmt: skip

    def decode_batch(
        self, handle: int, state: int, files: StoredFiles, targets: Targets, stream: int
    ) -> None:
        """Queues the decoding of files by the engines. Files must exist until the stream has finished."""
        count = len(files.lengths)
        self._call(
            "nvjpegDecodeBatchedInitialize", _pointer(handle), _pointer(state), count, 1, _RGB,
            long=True,
        )  # fmt: skip
        self._call(
            "nvjpegDecodeBatched", _pointer(handle), _pointer(state),
            _array(files.addresses), _array(files.lengths),
            _array(targets), _pointer(stream), long=True,
        )  # fmt: skip

    def decode_one(
        self, handle: int, state: int, address: int, length: int, target: Targets, stream: int
    ) -> None:
        """Decodes one file on the host and the GPU's cores.

        The work on the GPU is only queued. It uses `state` until the stream has finished.
        """
        self._call(
            "nvjpegDecode", _pointer(handle), _pointer(state), _pointer(address),
            ctypes.c_size_t(length), _RGB, _array(target), _pointer(stream), long=True,
        )  # fmt: skip

    def _new(self, name: str, *arguments: object) -> int:
        made = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(made), long=True)
        return made.value or 0

    def _call(self, name: str, *arguments: object, long: bool = False) -> None:
        status = int(getattr(self._long if long else self._short, name)(*arguments))
        if status:
            raise NvJpegError(name, status)


def load_nvjpeg(cuda: str) -> NvJpegLibrary:
    """Loads nvJPEG for `cuda`, the CUDA version of torch. Raises OSError if there is none."""
    tried = []
    for path in _places(cuda.partition(".")[0]):
        try:
            return NvJpegLibrary(path)
        except OSError as error:
            tried.append(str(error))
    raise OSError(tried[-1] if tried else "nowhere to look")


def _places(major: str) -> Iterator[str]:
    """Yields the paths of nvJPEG in NVIDIA's package, in torchvision and in the system, in this order."""
    for package, pattern in (
        ("nvidia", "*/lib/libnvjpeg.so*"),
        ("torchvision", "../torchvision.libs/libnvjpeg*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            found = sorted(str(path) for path in Path(root).glob(pattern))
            # Several versions may be installed. The version for torch's CUDA comes first.
            yield from sorted(found, key=lambda path: _major(path) != major)
    yield f"libnvjpeg.so.{major}"
    yield "libnvjpeg.so"


def _major(path: str) -> str:
    found = re.search(r"\.so\.(\d+)", path)
    return found[1] if found else ""


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _array(numbers: npt.NDArray[np.generic]) -> object:
    """Converts an array to a function argument that passes its address and keeps the array alive."""
    return np.ascontiguousarray(numbers).ctypes


class NvJpegStates:
    """Decoder states of nvJPEG: one for batches on the GPU's JPEG engines, one for single files."""

    def __init__(self, library: NvJpegLibrary, engine: int, cores: int) -> None:
        self._library = library
        self.batch = self.bitstream = self.single = 0
        with ExitStack() as undo:
            undo.callback(self.destroy)
            self.single = library.state(cores)
            if engine:
                self.batch = library.state(engine)
                library.preallocate(engine, self.batch, CHUNK, _SIDE)
                self.bitstream = library.bitstream(engine)
            undo.pop_all()

    def destroy(self) -> None:
        for made in ({"state": self.batch}, {"state": self.single}, {"bitstream": self.bitstream}):
            with suppress(NvJpegError):  # it may have failed before
                self._library.destroy(**made)


class NvJpegHandles:
    """Handles of nvJPEG on one GPU, and a few decoder states that threads borrow.

    Each state has its own memory and a dozen streams, and a single state keeps the JPEG engines
    busy. So there are fewer states than threads.

    Attributes:
        engine: Handle of the JPEG engines. 0 if the GPU has none, or if they cannot decode a valid
            test file.
        cores: Handle of the GPU's cores.
        any: `engine` if it is not 0, else `cores`.
    """

    def __init__(self, library: NvJpegLibrary, device: torch.device, sound: bytes) -> None:
        """Creates the handles on `device`, which must be current. `sound` is a valid JPEG for a test."""
        self._library = library
        self._device = device
        # None in the queue stands for states that are not created yet.
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

    def _find_engine(self, sound: bytes) -> None:
        try:
            self.engine = self._library.handle("hardware")
        except NvJpegError as error:
            if error.status != _OTHER_GPU:
                raise
            return
        stored = StoredFiles([sound])
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
        """Lends decoder states that no thread uses, and waits if there are none.

        Discards the states after an error.
        """
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
        """Destroys all states and handles. No call may be running."""
        with self._current():
            while not self._idle.empty():
                states = self._idle.get()
                if states is not None:
                    states.destroy()
            for handle in (self.engine, self.cores):
                with suppress(NvJpegError):
                    self._library.destroy(handle=handle)

    def _current(self) -> AbstractContextManager[object]:
        """Returns a context in which the GPU of the handles is the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
