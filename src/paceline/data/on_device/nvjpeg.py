"""`NvJpegDecoder`: JPEGs decoded on the GPU, by NVIDIA's nvJPEG.

In: files. Out: pixels in planes on the GPU. Baseline files are decoded many at a time by the GPU's own
JPEG engines where it has them, others one by one on its cores, all on the caller's stream, whose
priority lets the few kernels go between those of the training. One file that cannot be decoded fails
the whole call: then each is tried alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from weakref import finalize

import numpy as np
import torch

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device.batch_decoder import Decoded, DeviceImage, sound_jpeg, words_of
from paceline.data.on_device.jpeg_facts import JpegFile
from paceline.data.on_device.nvjpeg_library import (
    Files,
    NvJpegError,
    NvJpegLibrary,
    Targets,
    load_nvjpeg,
)
from paceline.data.on_device.own_stream import drained_stream, finish_current
from paceline.data.randomness import Int64

_INSTEAD = "or set data.decoder = 'auto'"
_ALLOCATOR_FAILURE, _OTHER_GPU = 5, 7
_ALIGNMENT = 256
# Sides within which the engines' answer depends on the kind of the file alone.
_USUAL = (64, 8192)
# Invalid parameter, bad JPEG, not supported, execution failed, internal error, not implemented,
# incomplete. Some of them may also be the decoder's own trouble: a sound file then shows it.
_FILES_FAULTS = frozenset({2, 3, 4, 6, 8, 9, 10})


class NvJpegDecoder:
    """ConfigError where nvJPEG cannot be loaded or does not work. Each thread that calls has states of
    its own."""

    interleaved = False

    def __init__(self, device: torch.device, library: NvJpegLibrary | None = None) -> None:
        self._device = device
        self._local = threading.local()
        self._batched: dict[bytes, bool] = {}
        try:
            self._library = library or load_nvjpeg(torch.version.cuda or "")
        except OSError as error:
            raise ConfigError(
                "data.decoder", "nvjpeg", f"nvJPEG cannot be loaded ({words_of(error)[:120]})",
                f"pip install nvidia-nvjpeg (CUDA 12: nvidia-nvjpeg-cu12), {_INSTEAD}",
            ) from None  # fmt: skip
        try:
            with drained_stream(device):
                self._handles = _Handles(self._library)
                finalize(self, self._handles.close).atexit = False
                self._decode_sound()
        except NvJpegError as error:
            _raise_if_memory(error)
            raise ConfigError(
                "data.decoder", "nvjpeg", f"nvJPEG does not work here ({error})",
                f"install the nvJPEG of this CUDA, {_INSTEAD}",
            ) from None  # fmt: skip

    def __call__(self, files: Sequence[JpegFile]) -> Decoded:
        try:
            return self._decode(files)
        except NvJpegError as error:
            _raise_unless_a_file(error)
            problem = str(error)
        alone = [self._alone(file) for file in files]
        try:
            self._decode_sound()
        except NvJpegError as error:
            _raise_if_memory(error)
            raise RunError(
                f"nvJPEG no longer decodes even a sound file ({error})",
                "start again with --resume auto, or set data.decoder = 'auto'",
            ) from error
        images = [one.images[0] if one else None for one in alone]
        return Decoded(images, alone, problem)

    def _alone(self, file: JpegFile) -> Decoded | None:
        self._forget()  # what failed may have left the state half-way
        try:
            return self._decode([file])
        except NvJpegError as error:
            _raise_unless_a_file(error)
            return None

    def _decode_sound(self) -> None:
        self._forget()
        self._decode([sound_jpeg()])
        finish_current(self._device)

    def _decode(self, files: Sequence[JpegFile]) -> Decoded:
        library, handles, here = self._library, self._handles, self._states()
        stored = _addresses(files)
        # The decoder writes what it sees in the file, so it is asked for the size.
        sizes = np.array([library.size(handles.any, *row) for row in stored.tolist()])
        memory, targets = _room(sizes, self._device)
        batched = np.array(
            [self._is_batched(file, *row) for file, row in zip(files, stored.tolist(), strict=True)]
        )
        stream = _stream(self._device)
        if batched.any():
            library.decode_batch(
                handles.engine, here.batch, stored[batched], targets[batched], stream
            )
        for row in np.flatnonzero(~batched):
            library.decode_one(handles.cores, here.single, stored[row], targets[row], stream)
            finish_current(self._device)
        images: list[DeviceImage | None] = [
            DeviceImage(address, width, height)
            for address, (width, height) in zip(targets[:, 0].tolist(), sizes.tolist(), strict=True)
        ]
        return Decoded(images, (memory, files))

    def _is_batched(self, file: JpegFile, address: int, length: int) -> bool:
        """Whether the engines take it: asked once for each kind of file of usual size."""
        engine = self._handles.engine
        if not engine:
            return False
        usual = min(file.width, file.height) >= _USUAL[0] and max(file[1:3]) <= _USUAL[1]
        known = self._batched.get(file.kind) if usual else None
        if known is None:
            known = self._library.is_batched(engine, self._states().bitstream, address, length)
            if usual:
                self._batched[file.kind] = known
        return known

    def _states(self) -> _States:
        if not hasattr(self._local, "states"):
            self._local.states = self._handles.new_states()
        states: _States = self._local.states
        return states

    def _forget(self) -> None:
        """What this thread has, whose work, if any, is waited for."""
        finish_current(self._device)
        if hasattr(self._local, "states"):
            self._handles.drop(self._local.states)
            del self._local.states

    def describe(self) -> str:
        how = "JPEG engines" if self._handles.engine else "no JPEG engines"
        return f"nvJPEG {self._library.version()} ({how})"


class _States:
    """What one thread needs: a state for the engines' batches and one for single files."""

    def __init__(self, library: NvJpegLibrary, engine: int, cores: int) -> None:
        self.batch = library.state(engine) if engine else 0
        self.bitstream = library.bitstream(engine) if engine else 0
        self.single = library.state(cores)


class _Handles:
    """nvJPEG's handles on the current device, and the states made of them."""

    def __init__(self, library: NvJpegLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._made: list[_States] = []
        self.cores = library.handle("default")
        try:
            self.engine = library.handle("hardware")
        except NvJpegError as error:
            if error.status != _OTHER_GPU:
                raise
            self.engine = 0
        self.any = self.engine or self.cores

    def new_states(self) -> _States:
        states = _States(self._library, self.engine, self.cores)
        with self._lock:
            self._made.append(states)
        return states

    def drop(self, states: _States) -> None:
        with self._lock:
            self._made.remove(states)
        with suppress(NvJpegError):  # of a state that failed; a new one takes its place
            self._library.destroy(state=states.batch, bitstream=states.bitstream)
            self._library.destroy(state=states.single)

    def close(self) -> None:
        for states in list(self._made):
            self.drop(states)
        with suppress(NvJpegError):
            self._library.destroy(handle=self.engine)
            self._library.destroy(handle=self.cores)


def _addresses(files: Sequence[JpegFile]) -> Files:
    pairs = []
    for file in files:
        view = np.frombuffer(file.data, dtype=np.uint8)
        pairs.append((view.__array_interface__["data"][0], len(view)))
    return np.array(pairs, dtype=np.uint64)


def _room(sizes: Int64, device: torch.device) -> tuple[torch.Tensor, Targets]:
    """Memory for images of these sizes, and where each lies in it, in nvJPEG's words."""
    pixels = sizes[:, 0] * sizes[:, 1]
    ends = np.cumsum(-(-3 * pixels // _ALIGNMENT) * _ALIGNMENT)
    memory = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
    first = memory.data_ptr() + np.concatenate(([0], ends[:-1]))
    targets = np.zeros((len(sizes), 8), dtype=np.uint64)
    for plane in range(3):
        targets[:, plane] = first + plane * pixels
        targets[:, 4 + plane] = sizes[:, 0]
    return memory, targets


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def _raise_unless_a_file(error: NvJpegError) -> None:
    """Returns where a file may be to blame."""
    _raise_if_memory(error)
    if error.status not in _FILES_FAULTS:
        raise error


def _raise_if_memory(error: NvJpegError) -> None:
    if error.status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(str(error)) from error
