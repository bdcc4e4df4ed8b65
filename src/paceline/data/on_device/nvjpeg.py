"""`NvJpegDecoder`: JPEGs decoded on the GPU, by NVIDIA's nvJPEG.

In: files. Out: pixels in planes on the GPU. Baseline files are decoded many at a time by the GPU's own
JPEG engines where it has them, others one by one on its cores, all on the caller's stream, whose
priority lets the few kernels go between those of the training. One file that cannot be decoded fails
the whole call: then each is tried alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import numpy as np
import torch

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device.batch_decoder import Decoded, DeviceImage, sound_jpeg, words_of
from paceline.data.on_device.jpeg_facts import JpegFile
from paceline.data.on_device.nvjpeg_handles import NvJpegHandles, NvJpegStates
from paceline.data.on_device.nvjpeg_library import (
    NvJpegError,
    NvJpegLibrary,
    Targets,
    load_nvjpeg,
)
from paceline.data.on_device.own_stream import drained_stream, finish_current
from paceline.data.randomness import Int64
from paceline.data.stored_files import StoredFiles

_INSTEAD = "or set data.decoder = 'auto'"
_ALLOCATOR_FAILURE, _INTERNAL_ERROR = 5, 8
_ALIGNMENT = 256
_OTHER_SIZE = "not the size that the file says"
# Sides within which the engines' answer depends on the kind of the file alone.
_USUAL = (64, 8192)
# Invalid parameter, bad JPEG, not supported, execution failed, internal error, not implemented,
# incomplete. Some of them may also be the decoder's own trouble: a sound file then shows it.
_FILES_FAULTS = frozenset({2, 3, 4, 6, 8, 9, 10})


class NvJpegDecoder:
    """ConfigError where nvJPEG cannot be loaded or does not work."""

    interleaved = False

    def __init__(self, device: torch.device, library: NvJpegLibrary | None = None) -> None:
        self._device = device
        # Kinds of files that the engines take.
        self._batched: set[bytes] = set()
        try:
            self._library = library or load_nvjpeg(torch.version.cuda or "")
        except OSError as error:
            raise ConfigError(
                "data.decoder", "nvjpeg", f"nvJPEG cannot be loaded ({words_of(error)[:120]})",
                f"pip install nvidia-nvjpeg (CUDA 12: nvidia-nvjpeg-cu12), {_INSTEAD}",
            ) from None  # fmt: skip
        try:
            with drained_stream(device):
                self._handles = NvJpegHandles(self._library, device, sound_jpeg())
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
        try:
            return self._decode([file])
        except NvJpegError as error:
            _raise_unless_a_file(error)
            return None

    def _decode_sound(self) -> None:
        found = self._decode([sound_jpeg()])
        if found.images[0] is None:
            raise NvJpegError(f"a sound file: {found.problem}", _INTERNAL_ERROR)

    def _decode(self, files: Sequence[JpegFile]) -> Decoded:
        stored = StoredFiles([file.data for file in files])
        # The decoder writes what it sees in the file: one that sees another size than we is not asked.
        handle = self._handles.any
        seen = [self._library.size(handle, *row) for row in stored.pairs()]
        good = [row for row, file in enumerate(files) if seen[row] == (file.width, file.height)]
        images: list[DeviceImage | None] = [None] * len(files)
        if not good:
            return Decoded(images, None, _OTHER_SIZE)
        memory, targets = _room(np.array([seen[row] for row in good]), self._device)
        with self._handles.borrowed() as states:
            try:
                self._decode_into(states, [files[row] for row in good], stored.of(good), targets)
            finally:
                finish_current(self._device)  # the next one gets the states
        for row, address in zip(good, targets[:, 0].tolist(), strict=True):
            images[row] = DeviceImage(address, *seen[row])
        return Decoded(images, memory, "" if len(good) == len(files) else _OTHER_SIZE)

    def _decode_into(
        self, states: NvJpegStates, files: Sequence[JpegFile], stored: StoredFiles, targets: Targets
    ) -> None:
        library, handles, stream = self._library, self._handles, _stream(self._device)
        pairs = stored.pairs()
        rows = range(len(files))
        batched = [row for row in rows if self._is_batched(states, files[row], *pairs[row])]
        if batched:
            library.decode_batch(
                handles.engine, states.batch, stored.of(batched), targets[batched], stream
            )
        for row in sorted(set(rows) - set(batched)):
            library.decode_one(handles.cores, states.single, *pairs[row], targets[row], stream)
            finish_current(self._device)

    def _is_batched(self, states: NvJpegStates, file: JpegFile, address: int, length: int) -> bool:
        """Whether the engines take it: asked once for each kind of file of usual size."""
        engine = self._handles.engine
        if not engine:
            return False
        usual = min(file.width, file.height) >= _USUAL[0] and max(file[1:3]) <= _USUAL[1]
        if usual and file.kind in self._batched:
            return True
        taken = self._library.is_batched(engine, states.bitstream, address, length)
        if taken and usual:
            self._batched.add(file.kind)
        return taken

    def describe(self) -> str:
        how = "JPEG engines" if self._handles.engine else "no JPEG engines"
        return f"nvJPEG {self._library.version()} ({how})"


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
        raise RunError(
            f"nvJPEG fails ({error})",
            "start again with --resume auto, or set data.decoder = 'auto'",
        ) from error


def _raise_if_memory(error: NvJpegError) -> None:
    if error.status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(str(error)) from error
