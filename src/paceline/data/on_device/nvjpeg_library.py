"""`NvJpegLibrary`: NVIDIA's nvJPEG, called directly.

In: files and the device's memory. Out: pixels there, once the given stream gets to it; an `NvJpegError`
with nvJPEG's number where a call fails. torchvision has a way to nvJPEG too, but from pageable memory and
one call at a time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.stored_files import StoredFiles

# One row an image: addresses of up to four planes, then the length of a line in each.
Targets = npt.NDArray[np.uint64]
_PLANES = 4
_RGB = 3
_FULL_COLOUR = 0
_BACKENDS = {"hardware": 3, "default": 0}
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
    """OSError where there is none. Handles may be shared by threads; states and bitstreams may not."""

    def __init__(self, path: str) -> None:
        self.path = path
        # The first lets others run meanwhile, which takes longer than a short call does.
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
        """Of the current device. Status 7 where `backend` is hardware and the GPU has none."""
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
        """Width and height, as the decoder will write them."""
        components, sampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * _PLANES)(), (ctypes.c_int * _PLANES)()
        self._call(
            "nvjpegGetImageInfo", _pointer(handle), _pointer(address), ctypes.c_size_t(length),
            ctypes.byref(components), ctypes.byref(sampling), widths, heights,
        )  # fmt: skip
        return widths[0], heights[0]

    def is_batched(self, handle: int, bitstream: int, address: int, length: int) -> bool:
        """Whether the GPU's JPEG engines take it."""
        no = ctypes.c_int(1)
        self._call(
            "nvjpegJpegStreamParseHeader", _pointer(handle), _pointer(address),
            ctypes.c_size_t(length), _pointer(bitstream),
        )  # fmt: skip
        self._call(
            "nvjpegDecodeBatchedSupported", _pointer(handle), _pointer(bitstream), ctypes.byref(no)
        )
        return no.value == 0

    def make_room(self, handle: int, state: int, count: int, side: int) -> None:
        """For batches of the engines: memory for `count` images of `side` × `side`. Where it does not do,
        decoding makes more, and for that waits until the GPU has nothing else to do."""
        self._call(
            "nvjpegDecodeBatchedPreAllocate", _pointer(handle), _pointer(state), count, side, side,
            _FULL_COLOUR, _RGB, long=True,
        )  # fmt: skip

    def decode_batch(
        self, handle: int, state: int, files: StoredFiles, targets: Targets, stream: int
    ) -> None:
        """By the engines. The files must stay until the stream is through with them."""
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
        """On the host and the GPU's cores. The state is in use until the stream is through with it."""
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
    """`cuda` is torch's CUDA version. OSError, with what was tried, where none can be loaded."""
    tried = []
    for path in _places(cuda.partition(".")[0]):
        try:
            return NvJpegLibrary(path)
        except OSError as error:
            tried.append(str(error))
    raise OSError(tried[-1] if tried else "nowhere to look")


def _places(major: str) -> Iterator[str]:
    """NVIDIA's package first, then the copy that torchvision brings, then the system's."""
    for package, pattern in (
        ("nvidia", "*/lib/libnvjpeg.so*"),
        ("torchvision", "../torchvision.libs/libnvjpeg*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            found = sorted(str(path) for path in Path(root).glob(pattern))
            # One process may hold several; that of torch's CUDA comes first.
            yield from sorted(found, key=lambda path: _major(path) != major)
    yield f"libnvjpeg.so.{major}"
    yield "libnvjpeg.so"


def _major(path: str) -> str:
    found = re.search(r"\.so\.(\d+)", path)
    return found[1] if found else ""


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _array(numbers: npt.NDArray[np.generic]) -> object:
    """What a call takes for the address of the numbers, and keeps them alive until it returns."""
    return np.ascontiguousarray(numbers).ctypes
