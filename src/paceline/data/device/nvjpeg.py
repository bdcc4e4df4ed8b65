"""JPEG files on the GPU: `jpeg_file` selects supported files, and `NvJpeg` decodes them with nvJPEG."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from PIL import Image

from paceline.core.errors import ConfigError, RunError
from paceline.core.untrusted import one_line
from paceline.data.decode.library import StoredFiles
from paceline.data.device.nvjpeg_library import (
    NvJpegError,
    NvJpegHandles,
    NvJpegLibrary,
    NvJpegStates,
    Targets,
    load_nvjpeg,
)
from paceline.data.device.streams import drained_stream, finish_current
from paceline.data.order import Int64

_INSTEAD = "or set data.decoder = 'auto'"
_ALLOCATOR_FAILURE, _INTERNAL_ERROR = 5, 8
_ALIGNMENT = 256
_OTHER_SIZE = "not the size that the file says"
# Range of sides, in pixels, within which the kind of a file alone decides if the engines support it.
_USUAL = (64, 8192)
# nvJPEG's status codes that a file may cause: invalid parameter, bad JPEG, not supported, execution
# failed, internal error, not implemented, incomplete. A decoder that does not work may return some of
# these, too. Decoding a valid file then shows this.
_FILES_FAULTS = frozenset({2, 3, 4, 6, 8, 9, 10})
Bytes = bytes | memoryview
_START = b"\xff\xd8\xff"
_END = b"\xff\xd9"
# Markers of supported frames: baseline, extended sequential and progressive, with Huffman codes.
_TAKEN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_SCAN, _APP1, _ADOBE, _RESTART = 0xDA, 0xE1, 0xEE, 0xDD
_PROGRESSIVE = 0xC2
# Markers zero, start, end and number of lines. Decoders treat these differently before a scan.
_MISPLACED = frozenset({0x00, 0xD8, 0xD9, 0xDC})
_RELEVANT = _OTHER_FRAMES | {_APP1, _ADOBE}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
# Maximum length of the padding that some writers add after the end marker.
_TAIL_BYTES = 64
_MOST_PIXELS = 64_000_000
_ORIENTATION_TAG = 0x0112
_RGB_NAMES = b"RGB"


class DeviceImage(NamedTuple):
    """Pixels on the device: 3 × height × width bytes at `address`."""

    address: int
    width: int
    height: int


@dataclass(frozen=True)
class Decoded:
    """The result of decoding several files.

    Attributes:
        images: One image per file. The pixels are complete when the current stream has finished.
        held: Memory that must not be freed before the images are complete.
        problem: nvJPEG's message for the first failure.
    """

    images: list[DeviceImage | None]
    held: Any
    problem: str = ""


class JpegFile(NamedTuple):
    """A JPEG file. Files whose coding parameters differ only in the image size have the same `kind`."""

    data: Bytes
    width: int
    height: int
    kind: bytes


def jpeg_file(data: Bytes) -> JpegFile | None:
    """Returns the file as a `JpegFile` if nvJPEG decodes it as Pillow does, else None.

    The result is None for formats other than JPEG, CMYK or RGB inside a JPEG, files rotated by
    Exif, arithmetic or lossless coding, more than 8 bits, very large sizes and truncated files. The
    function reads only the segments before the first scan, which takes microseconds.
    """
    if data[:3] != _START or _END not in bytes(data[-_TAIL_BYTES:]):
        return None
    try:
        return _before_scan(data)
    except (struct.error, IndexError):
        return None


def _before_scan(data: Bytes) -> JpegFile | None:
    place, found, restarts = 2, None, False
    while True:
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in _ALONE:
            place += 2
            continue
        if marker in _MISPLACED:
            return None
        length: int = struct.unpack_from(">H", data, place + 2)[0]
        if marker == _SCAN:
            return _at_scan(found, data[place + 4], restarts)
        restarts |= marker == _RESTART
        if marker in _TAKEN_FRAMES:
            if found is not None:  # a JPEG has exactly one frame
                return None
            found = _frame(data, place + 4, marker)
            if found is None:
                return None
        elif marker in _RELEVANT and not _is_plain(
            marker, bytes(data[place + 4 : place + 2 + length])
        ):
            return None
        place += 2 + length


def _at_scan(found: JpegFile | None, components: int, restarts: bool) -> JpegFile | None:
    """Completes `JpegFile.kind` at the first scan, by whether there are restart markers.

    Returns None for a sequential file with components in separate scans, which JPEG engines do not
    support.
    """
    if found is None or (found.kind[0] != _PROGRESSIVE and components != len(found.kind) - 1):
        return None
    return found._replace(kind=found.kind + bytes([restarts]))


def _is_plain(marker: int, segment: bytes) -> bool:
    """Returns True unless this metadata segment makes decoders return different pixels."""
    if marker == _APP1:
        return _is_upright(segment)
    if marker == _ADOBE:
        # 1 is YCbCr, which is the default for three components.
        return not segment.startswith(b"Adobe") or segment[11] == 1
    return False


def _frame(data: Bytes, place: int, marker: int) -> JpegFile | None:
    bits, height, width, components = struct.unpack_from(">BHHB", data, place)
    if bits != 8 or components not in (1, 3) or not 0 < width * height <= _MOST_PIXELS:
        return None
    table = bytes(data[place + 6 : place + 6 + 3 * components])
    if len(table) < 3 * components or table[::3] == _RGB_NAMES:
        return None
    # The kind does not include component names and quantization tables.
    return JpegFile(data, width, height, bytes([marker]) + table[1::3])


def _is_upright(segment: bytes) -> bool:
    """Returns True if an APP1 segment is readable and does not rotate the image."""
    if not segment.startswith(b"Exif\0\0"):
        return b"Orientation" not in segment  # XMP may also contain an orientation
    tiff = segment[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == _ORIENTATION_TAG:
                return bool(kind == 3 and value == 1)
    except struct.error:
        return False
    return True


class NvJpeg:
    """Decodes many JPEG files on the GPU into planes of one channel, with NVIDIA's nvJPEG.

    The GPU's JPEG engines decode many baseline files at a time. If the GPU has no engines, or the
    engines do not support a file, the GPU's cores decode file by file. All work is queued on the
    caller's stream. If one file of a call cannot be decoded, the whole call fails, and each file is
    decoded alone. Errors that no file causes end the run, because a silent fall-back to the host
    would be slow. Thread-safe if each thread has its own stream.
    """

    def __init__(self, device: torch.device, library: NvJpegLibrary | None = None) -> None:
        """Loads nvJPEG. Raises ConfigError if nvJPEG cannot be loaded or does not work on `device`."""
        self._device = device
        # Kinds of files that the engines support.
        self._batched: set[bytes] = set()
        try:
            self._library = library or load_nvjpeg(torch.version.cuda or "")
        except OSError as error:
            raise ConfigError(
                "data.decoder", "nvjpeg", f"nvJPEG cannot be loaded ({one_line(str(error))[:120]})",
                f"pip install nvidia-nvjpeg (CUDA 12: nvidia-nvjpeg-cu12), {_INSTEAD}",
            ) from None  # fmt: skip
        try:
            with drained_stream(device):
                self._handles = NvJpegHandles(self._library, device, bytes(sound_jpeg().data))
                finalize(self, self._handles.close).atexit = False
                self._decode_sound()
        except NvJpegError as error:
            _raise_if_memory(error)
            raise ConfigError(
                "data.decoder", "nvjpeg", f"nvJPEG does not work here ({error})",
                f"install the nvJPEG of this CUDA, {_INSTEAD}",
            ) from None  # fmt: skip

    def __call__(self, files: Sequence[JpegFile]) -> Decoded:
        """Queues the decoding of at most CHUNK files on the current stream.

        Raises:
            torch.OutOfMemoryError: If the GPU has no memory left.
            RunError: If nvJPEG fails for a reason other than a corrupt or unsupported file.
        """
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
        # nvJPEG writes the size that it reads from the header, so that size must equal the allocated one.
        handle = self._handles.any
        seen = [self._library.size(handle, *row) for row in stored.pairs()]
        good = [row for row, file in enumerate(files) if seen[row] == (file.width, file.height)]
        images: list[DeviceImage | None] = [None] * len(files)
        if not good:
            return Decoded(images, None, _OTHER_SIZE)
        memory, targets = _allocate(np.array([seen[row] for row in good]), self._device)
        with self._handles.borrowed() as states:
            try:
                self._decode_into(states, [files[row] for row in good], stored.of(good), targets)
            finally:
                finish_current(self._device)  # another thread may use the states next
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
        """Returns True if the GPU's JPEG engines support the file.

        Remembers nvJPEG's answer for files of common size with the same coding parameters.
        """
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


def _allocate(sizes: Int64, device: torch.device) -> tuple[torch.Tensor, Targets]:
    """Allocates memory for images of these sizes.

    Returns the memory, and for each image the addresses and pitches that nvJPEG expects.
    """
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
    """Raises RunError if the file that is decoded cannot be the cause of `error`."""
    _raise_if_memory(error)
    if error.status not in _FILES_FAULTS:
        raise RunError(
            f"nvJPEG fails ({error})",
            "start again with --resume auto, or set data.decoder = 'auto'",
        ) from error


def _raise_if_memory(error: NvJpegError) -> None:
    if error.status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(str(error)) from error


def sound_jpeg() -> JpegFile:
    """Returns a valid JPEG of a size and kind that JPEG engines support."""
    stream = io.BytesIO()
    Image.new("RGB", (128, 128)).save(stream, "JPEG", subsampling="4:2:0")
    found = jpeg_file(stream.getvalue())
    assert found is not None
    return found
