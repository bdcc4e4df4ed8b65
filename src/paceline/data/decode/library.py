"""`RegionLibrary` calls the C library that decodes and resamples crops of JPEGs.

The calls release the interpreter lock. The environment variable PACELINE_JPEG_REGION_LIBRARY gives
the path of a built library. If the variable is not set, the library is built. A library is used
only if its pixels equal those of the installed Pillow exactly.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from paceline.data.augment import RESAMPLING, Box, Pixels, pixels_of
from paceline.data.decode.build import BuildError, cached_library
from paceline.data.decode.decoder import RegionUnavailableError
from paceline.data.image import MODES
from paceline.data.order import Int64
from paceline.data.settings import INTERPOLATIONS

VARIABLE = "PACELINE_JPEG_REGION_LIBRARY"
_FILTERS = {name: number for number, name in enumerate(INTERPOLATIONS)}
# Pillow 12 resamples images differently if their height is more than this many times their width.
TALLEST = 100
# ctypes silently truncates integers above this limit.
_MOST_BYTES = 2**31 - 1
_AT, _INT = ctypes.c_void_p, ctypes.c_int
_FILE = (ctypes.c_char_p, ctypes.c_size_t)
_BOX = (ctypes.c_float,) * 4
# For each function in region.h, the result type, then the argument types.
_TYPES: dict[str, tuple[Any, ...]] = {
    "region_version": (ctypes.c_char_p,),
    "region_open": (_AT,),
    "region_close": (None, _AT),
    "region_size": (_INT, *_FILE, _AT, _AT),
    "region_prepare": (_INT, _AT, *_FILE, *_BOX, *[_INT] * 5, _AT),
    "region_square_of_pixels": (_INT, _AT, _AT, *[_INT] * 3, *_BOX, *[_INT] * 5, _AT),
    "region_sizes": (None, _INT, *[_AT] * 3),
    "region_prepare_many": (None, _AT, _INT, *[_AT] * 4, *[_INT] * 3, *[_AT] * 2),
    "region_read_many": (None, _INT, *[_AT] * 5),
}


@dataclass
class Pieces:
    """Byte ranges of files that one call of `RegionLibrary.read_many` reads.

    Attributes:
        descriptors: File descriptor of each byte range.
        offsets: Offset of each range in its file, in bytes.
        sizes: Length of each range in bytes.
        targets: Memory address to which each range is read.
        outcomes: For each range, the number of bytes read (-1 after an error), and the size and
            modification time of the file.
    """

    descriptors: npt.NDArray[np.int32]
    offsets: Int64
    sizes: Int64
    targets: npt.NDArray[np.uint64]
    outcomes: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = np.full((len(self.sizes), 3), -1, dtype=np.int64)


class StoredFiles:
    """Addresses and lengths of files whose bytes are in memory. Keeps that memory alive."""

    def __init__(self, contents: Sequence[bytes | memoryview]) -> None:
        views = [np.frombuffer(data, dtype=np.uint8) for data in contents]
        self.contents = contents
        places = [view.__array_interface__["data"][0] for view in views]
        self.addresses = np.array(places, dtype=np.uint64)
        self.lengths = np.array([len(view) for view in views], dtype=np.int64)

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the address and length of each file."""
        return list(zip(self.addresses.tolist(), self.lengths.tolist(), strict=True))

    def of(self, rows: Sequence[int]) -> StoredFiles:
        """Returns the files with the given indices."""
        return StoredFiles([self.contents[row] for row in rows])


class RegionLibrary:
    """Decodes and resamples crops of JPEGs with the C library.

    Thread-safe: each thread has its own decoder state.
    """

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: If the library cannot be loaded.
            AttributeError: If the file is a different library.
        """
        library = load_functions(path)
        # Reading a header takes less time than releasing the interpreter lock.
        self._size = load_functions(path, keeping_the_lock=True).region_size
        self.version = str(library.region_version().decode())
        self._library = library
        self._local = threading.local()
        self._decoder()

    def size(self, data: bytes) -> tuple[int, int] | None:
        """Returns width and height, or None if the file is no JPEG that the library supports."""
        width, height = ctypes.c_int32(), ctypes.c_int32()
        if self._size(data, len(data), ctypes.byref(width), ctypes.byref(height)):
            return None
        if height.value > TALLEST * width.value:
            return None
        return width.value, height.value

    def prepare(
        self,
        data: bytes,
        shape: tuple[int, int],
        box: Box,
        flip: bool,
        interpolation: str,
        out: Pixels,
    ) -> bool:
        """Decodes `box` of a JPEG and resamples it to `out`.

        Args:
            data: The bytes of the file.
            shape: Width and height of the image, as returned by `size`.
            box: Left, top, right and bottom in pixels.
            flip: Flips the result horizontally.
            interpolation: Name of the resampling filter.
            out: Receives the result. A contiguous square array.

        Returns:
            True if `out` was filled. False if the file is damaged. The content of `out` is then
            undefined.
        """
        check_square(out)
        rows, _, channels = out.shape
        outcome: int = self._library.region_prepare(
            self._decoder(), data, len(data), *box, flip, rows, _FILTERS[interpolation],
            down_first(*shape, rows), channels, address(out),
        )  # fmt: skip
        return outcome == 0

    def square(self, pixels: Pixels, box: Box, flip: bool, interpolation: str, out: Pixels) -> bool:
        """Resamples `box` of a decoded image to `out`, with the arguments of `prepare`.

        Returns:
            True if `out` was filled. False if the library does not support the array. The content
            of `out` is then undefined.
        """
        check_square(out)
        if not _is_supported(pixels):
            return False
        height, width, bands = pixels.shape
        rows, _, channels = out.shape
        outcome: int = self._library.region_square_of_pixels(
            self._decoder(), address(pixels), width, height, bands, *box, flip, rows,
            _FILTERS[interpolation], down_first(width, height, rows), channels, address(out),
        )  # fmt: skip
        return outcome == 0

    def sizes(self, files: StoredFiles) -> npt.NDArray[np.int32]:
        """Returns width and height of each file, or zeros if the library does not support the file."""
        sizes = np.zeros((len(files.lengths), 2), dtype=np.int32)
        self._library.region_sizes(
            len(sizes), files.addresses.ctypes.data, files.lengths.ctypes.data, sizes.ctypes.data
        )
        sizes[sizes[:, 1] > TALLEST * sizes[:, 0]] = 0
        return sizes

    def prepare_many(
        self,
        files: StoredFiles,
        boxes: npt.NDArray[np.float32],
        turns: npt.NDArray[np.int32],
        interpolation: str,
        outs: Sequence[Pixels],
    ) -> list[bool]:
        """Calls `prepare` for each file.

        Args:
            files: The JPEGs.
            boxes: Left, top, right and bottom for each file.
            turns: For each file, 1 to flip the result (else 0), and the result of `down_first` as 0
                or 1.
            interpolation: Name of the resampling filter.
            outs: The array to fill for each file. All have the same shape.

        Returns:
            For each file, True if its array in `outs` was filled.
        """
        count, (side, _, channels) = len(outs), outs[0].shape
        targets = addresses_of_squares(outs)
        shapes = (files.lengths.shape, boxes.shape, turns.shape)
        if shapes != ((count,), (count, 4), (count, 2)):
            raise ValueError(f"{count} output arrays expected, got arrays of the shapes {shapes}")
        outcomes = np.full(count, -1, dtype=np.int32)
        self._library.region_prepare_many(
            self._decoder(), count, files.addresses.ctypes.data, files.lengths.ctypes.data,
            boxes.ctypes.data, turns.ctypes.data, side, _FILTERS[interpolation], channels,
            targets.ctypes.data, outcomes.ctypes.data,
        )  # fmt: skip
        return [outcome == 0 for outcome in outcomes.tolist()]

    def read_many(self, pieces: Pieces) -> None:
        """Reads all byte ranges and records the results in `pieces.outcomes`. Does not raise."""
        arrays = (pieces.descriptors, pieces.offsets, pieces.sizes, pieces.targets, pieces.outcomes)
        addresses = [array.ctypes.data for array in arrays]
        self._library.region_read_many(len(pieces.sizes), *addresses)

    def _decoder(self) -> int:
        state: _DecoderState | None = getattr(self._local, "decoder", None)
        if state is None:
            state = self._local.decoder = _DecoderState(self._library)
        return state.handle


class _DecoderState:
    """Memory that the C library uses for one thread; freed when the thread ends."""

    def __init__(self, library: ctypes.CDLL) -> None:
        handle = library.region_open()
        if not handle:
            raise OSError("it was built for another libjpeg")
        self.handle = int(handle)
        self._close = library.region_close

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            self._close(handle)


def load_functions(path: Path, *, keeping_the_lock: bool = False) -> ctypes.CDLL:
    """Loads a library and sets the types of its functions.

    Args:
        path: File of the library.
        keeping_the_lock: Calls of the functions do not release the interpreter lock.

    Raises:
        OSError: If the library cannot be loaded.
        AttributeError: If the library lacks a function.
    """
    loader = ctypes.PyDLL if keeping_the_lock else ctypes.CDLL
    # RTLD_LOCAL, because Pillow contains another libjpeg with the same symbols.
    library = loader(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name, (result, *arguments) in _TYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _is_supported(pixels: Pixels) -> bool:
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
        return False
    return len(pixels) <= TALLEST * pixels.shape[1] and pixels.nbytes <= _MOST_BYTES


def check_square(out: Pixels) -> None:
    """Raises ValueError unless `out` is a square array of bytes to which the C library can write."""
    writable = out.flags.c_contiguous and out.flags.writeable and out.dtype == np.uint8
    if out.shape[0] != out.shape[1] or not writable:
        raise ValueError(f"not a contiguous, writable square of bytes: {out.shape}")


def addresses_of_squares(outs: Sequence[Pixels]) -> npt.NDArray[np.uint64]:
    """Returns the memory addresses of square arrays, which must all have the same shape."""
    for out in outs:
        check_square(out)
        if out.shape != outs[0].shape:
            raise ValueError(f"output arrays differ in shape: {out.shape}, {outs[0].shape}")
    return np.array([address(out) for out in outs], dtype=np.uint64)


def address(array: Pixels) -> int:
    """Returns the memory address of an array, faster than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


def region_library() -> RegionLibrary:
    """Loads the C library, after building it if needed. Later calls return the same object.

    Raises:
        RegionUnavailableError: If no library can be built, or its pixels differ from Pillow's.
    """
    loaded = _load_checked(os.environ.get(VARIABLE, ""))
    if isinstance(loaded, tuple):
        raise RegionUnavailableError(*loaded)
    return loaded


@functools.cache
def _load_checked(named: str) -> RegionLibrary | tuple[str, str]:
    """Returns the library, or else the cause and the remedy of the failure.

    The result is cached. It is no exception, because a cached exception would keep its traceback
    alive.
    """
    try:
        library = _load_named(named) if named else _load_built()
    except BuildError as error:
        return error.cause, error.remedy
    except (OSError, AttributeError) as error:
        remedy = f"check {VARIABLE}" if named else "fix the installation of libjpeg-turbo"
        return f"the library does not load ({error})", remedy
    try:
        why = disagreement(library)
    except (OSError, KeyError, ValueError) as error:  # Pillow was built without JPEG
        return f"it cannot be compared with Pillow ({error})", "install a Pillow with JPEG support"
    if why:
        return why, "report this to the developers; data.decoder = 'pillow' works"
    return library


def _load_named(named: str) -> RegionLibrary:
    if not Path(named).is_file():
        raise OSError(f"{named}: no such file")
    return RegionLibrary(Path(named).absolute())


def _load_built() -> RegionLibrary:
    try:
        return RegionLibrary(cached_library())
    except (OSError, AttributeError):
        # The cached library needs a libjpeg that was removed or replaced.
        return _load_copy(cached_library(rebuild=True))


def _load_copy(path: Path) -> RegionLibrary:
    """Loads a copy of `path`, because a process cannot load a changed file by its old name."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="again-", suffix=".so") as copy:
        copy.write(path.read_bytes())
        copy.flush()
        return RegionLibrary(Path(copy.name))


def down_first(width: int, height: int, size: int) -> bool:
    """Returns True if Pillow resizes a `width` × `height` box to `size` × `size` vertically first.

    Pixels are rounded between the horizontal and the vertical pass, so the order changes the
    result. Pillow 12 resamples horizontally first. Pillow 13 resamples vertically first if the
    factor by which the height shrinks is more than twice that of the width. A trial with Pillow
    decides, not the version number.
    """
    return height > size and height - size > 2 * (width - size) and _pillow_chooses_the_order()


@functools.cache
def _pillow_chooses_the_order() -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (96, 17), dtype=np.uint8)
    image, bilinear = Image.fromarray(noise), Image.Resampling.BILINEAR
    # Two calls of `resize` that change one side each have a known order.
    rows_first = image.resize((17, 16), bilinear).resize((16, 16), bilinear)
    return rows_first.tobytes() == image.resize((16, 16), bilinear).tobytes()


# Constants of the comparison with Pillow. Side of the result. Sizes of images that are wide, tall, and
# smaller than the result. Boxes as fractions: the whole image, the middle, and one with fractional edges.
_SIZE = 12
_SHAPES = ((61, 37), (37, 83), (9, 11))
_BOXES = ((0.0, 0.0, 1.0, 1.0), (0.3, 0.4, 0.8, 0.9), (0.11, 0.0, 0.57, 0.61))
_FLIPPED = Image.Transpose.FLIP_LEFT_RIGHT


def disagreement(library: RegionLibrary) -> str:
    """Returns which test image the library decodes differently from Pillow, or "" if there is none.

    The comparison takes about 20 ms, once per process. It ensures that untested versions of Pillow
    and libjpeg do not change a training.
    """
    for at, (width, height) in enumerate(_SHAPES):
        for kind, data in enumerate(_files(width, height)):
            for number, name in enumerate(RESAMPLING, start=at + kind):
                channels, flip = (1, 3, 3)[(number + at) % 3], number % 2 == 1
                if not _agrees(library, data, _BOXES[number % 3], name, channels, flip):
                    return f"its pixels differ from those of Pillow {PIL.__version__} ({name})"
    return ""


def _files(width: int, height: int) -> list[bytes]:
    """Returns JPEGs to test the library with: all chroma subsamplings, a progressive and a gray file."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((width, height), box=(0, 0, width / 4, height / 4))
    wide = _encoded(image, subsampling=1)
    return [
        _encoded(image, subsampling=0),
        wide,
        _encoded(image, subsampling=2),
        _with_tall_chroma(wide),
        _encoded(image, subsampling=2, progressive=True),
        _encoded(image.convert("L")),
    ]


def _encoded(image: Image.Image, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def _with_tall_chroma(wide: bytes) -> bytes:
    """Returns a JPEG with 4:4:0 subsampling, made from one with 4:2:2 by exchanging width and height.

    Pillow cannot write such files.
    """
    frame = wide.index(b"\xff\xc0")
    height, width = wide[frame + 5 : frame + 7], wide[frame + 7 : frame + 9]
    start, rest = wide[: frame + 5], wide[frame + 12 :]
    return start + width + height + wide[frame + 9 : frame + 11] + b"\x12" + rest


def _agrees(
    library: RegionLibrary,
    data: bytes,
    fractions: tuple[float, float, float, float],
    name: str,
    channels: int,
    flip: bool,
) -> bool:
    """Returns True if the library and Pillow give the same crop, from a JPEG and from its pixels."""
    opened = Image.open(io.BytesIO(data))
    image = opened.convert(MODES[channels])
    left, top, right, bottom = fractions
    box = left * image.width, top * image.height, right * image.width, bottom * image.height
    got = np.empty((2, _SIZE, _SIZE, channels), dtype=np.uint8)
    if library.size(data) != image.size:
        return False
    if not library.prepare(data, image.size, box, flip, name, got[0]):
        return False
    if not library.square(pixels_of(opened), box, flip, name, got[1]):
        return False
    square = image.resize((_SIZE, _SIZE), RESAMPLING[name], box)
    want = pixels_of(square.transpose(_FLIPPED) if flip else square)
    return np.array_equal(got, np.stack([want, want]))
