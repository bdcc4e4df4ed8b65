"""`RegionLibrary`: the C library of the region decoder, called without the interpreter's lock.

PACELINE_JPEG_REGION_LIBRARY names a built library; otherwise one is built. A library that does not
give exactly the pixels of the installed Pillow is not used.
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
# Pillow 12 changes the passes for images that are taller than this many times their width.
TALLEST = 100
# ctypes cuts whole numbers off silently.
_MOST_BYTES = 2**31 - 1
_AT, _INT = ctypes.c_void_p, ctypes.c_int
_FILE = (ctypes.c_char_p, ctypes.c_size_t)
_BOX = (ctypes.c_float,) * 4
# What each returns, then what it takes: see region.h.
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
    """Parts of files that are read together. `targets` are addresses; the memory there must be as
    long as `sizes` say. `found`, for each: bytes read (-1: an error), and size and time of change
    of its file."""

    descriptors: npt.NDArray[np.int32]
    offsets: Int64
    sizes: Int64
    targets: npt.NDArray[np.uint64]
    found: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.found = np.full((len(self.sizes), 3), -1, dtype=np.int64)
        for array in (self.descriptors, self.offsets, self.sizes, self.targets):
            if not array.flags.c_contiguous or array.shape != self.sizes.shape:
                raise ValueError(
                    f"pieces of arrays of other lengths: {array.shape}, {self.sizes.shape}"
                )
        if (self.offsets < 0).any() or (self.sizes < 0).any():
            raise ValueError("a piece of negative offset or size")


class StoredFiles:
    """Where whole files lie in memory: addresses and lengths, good as long as `held` lives."""

    def __init__(self, held: Sequence[bytes | memoryview]) -> None:
        views = [np.frombuffer(data, dtype=np.uint8) for data in held]
        self.held = held
        places = [view.__array_interface__["data"][0] for view in views]
        self.addresses = np.array(places, dtype=np.uint64)
        self.lengths = np.array([len(view) for view in views], dtype=np.int64)

    def pairs(self) -> list[tuple[int, int]]:
        """Address and length of each."""
        return list(zip(self.addresses.tolist(), self.lengths.tolist(), strict=True))

    def of(self, rows: Sequence[int]) -> StoredFiles:
        """Some of them."""
        return StoredFiles([self.held[row] for row in rows])


class RegionLibrary:
    """Used by many threads at once; each has a decoder of its own."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded, AttributeError where it is another library."""
        library = load_functions(path)
        # Reading a header takes less time than giving the interpreter's lock away.
        self._size = load_functions(path, keeping_the_lock=True).region_size
        self.version = str(library.region_version().decode())
        self._library = library
        self._local = threading.local()
        self._decoder()

    def size(self, data: bytes) -> tuple[int, int] | None:
        """Width and height of a JPEG that this library may take; None for everything else."""
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
        """Fills `out` with `box` of the image, whose `size` is `shape`. False where the file is not
        as it should be; then there may be anything in `out`."""
        check_square(out)
        rows, _, channels = out.shape
        outcome: int = self._library.region_prepare(
            self._decoder(), data, len(data), *box, flip, rows, _FILTERS[interpolation],
            down_first(*shape, rows), channels, address(out),
        )  # fmt: skip
        return outcome == 0

    def square(self, pixels: Pixels, box: Box, flip: bool, interpolation: str, out: Pixels) -> bool:
        """Fills `out` with `box` of an image that is decoded already. False where the array is not
        one that this library takes; then there may be anything in `out`."""
        check_square(out)
        if not is_image(pixels):
            return False
        height, width, bands = pixels.shape
        rows, _, channels = out.shape
        outcome: int = self._library.region_square_of_pixels(
            self._decoder(), address(pixels), width, height, bands, *box, flip, rows,
            _FILTERS[interpolation], down_first(width, height, rows), channels, address(out),
        )  # fmt: skip
        return outcome == 0

    def sizes(self, files: StoredFiles) -> npt.NDArray[np.int32]:
        """A row each: `size`, 0 and 0 where that is None."""
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
        """`prepare` for each file; `turns` has flip and `down_first`. Which of `outs` were filled."""
        count, (side, _, channels) = len(outs), outs[0].shape
        targets = addresses_of_squares(outs)
        shapes = (files.lengths.shape, boxes.shape, turns.shape)
        if shapes != ((count,), (count, 4), (count, 2)):
            raise ValueError(f"{count} squares, but {shapes}")
        boxes, turns = np.ascontiguousarray(boxes), np.ascontiguousarray(turns)
        outcomes = np.full(count, -1, dtype=np.int32)
        self._library.region_prepare_many(
            self._decoder(), count, files.addresses.ctypes.data, files.lengths.ctypes.data,
            boxes.ctypes.data, turns.ctypes.data, side, _FILTERS[interpolation], channels,
            targets.ctypes.data, outcomes.ctypes.data,
        )  # fmt: skip
        return [outcome == 0 for outcome in outcomes.tolist()]

    def read_many(self, pieces: Pieces) -> None:
        """Fills the pieces' `found`; never fails, but says there what failed."""
        arrays = (pieces.descriptors, pieces.offsets, pieces.sizes, pieces.targets, pieces.found)
        addresses = [array.ctypes.data for array in arrays]
        self._library.region_read_many(len(pieces.sizes), *addresses)

    def _decoder(self) -> int:
        held: _Handle | None = getattr(self._local, "decoder", None)
        if held is None:
            held = self._local.decoder = _Handle(self._library)
        return held.handle


class _Handle:
    """The memory of one thread in the library, freed with the thread. OSError where its libjpeg
    does not fit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        handle = library.region_open()
        if not handle:
            raise OSError("its libjpeg is another one than it was built for")
        self.handle = int(handle)
        self._close = library.region_close

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            self._close(handle)


def load_functions(path: Path, *, keeping_the_lock: bool = False) -> ctypes.CDLL:
    """OSError where it cannot be loaded, AttributeError where it is another library, or another
    version. `keeping_the_lock`: calls keep the interpreter's lock."""
    kind = ctypes.PyDLL if keeping_the_lock else ctypes.CDLL
    # Local symbols: Pillow brings a libjpeg too, and neither may call into the other.
    library = kind(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name, (returned, *taken) in _TYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, taken
    return library


def is_image(pixels: Pixels) -> bool:
    """One that the library may take: whole in memory, and not too tall."""
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
        return False
    return len(pixels) <= TALLEST * pixels.shape[1] and pixels.nbytes <= _MOST_BYTES


def check_square(out: Pixels) -> None:
    whole = out.flags.c_contiguous and out.flags.writeable and out.dtype == np.uint8
    if out.shape[0] != out.shape[1] or not whole:
        raise ValueError(f"a contiguous square is filled, not {out.shape}")


def addresses_of_squares(outs: Sequence[Pixels]) -> npt.NDArray[np.uint64]:
    for out in outs:
        check_square(out)
        if out.shape != outs[0].shape:
            raise ValueError(f"squares of one shape are filled, not {out.shape}")
    return np.array([address(out) for out in outs], dtype=np.uint64)


def address(array: Pixels) -> int:
    """Sooner than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


@functools.cache
def _found(named: str) -> RegionLibrary | tuple[str, str]:
    """Or cause and remedy. No exception is kept: its traceback would keep alive all that it passed."""
    try:
        library = _load_named(named) if named else _load_built()
    except BuildError as error:
        return error.cause, error.remedy
    except (OSError, AttributeError) as error:
        remedy = f"check {VARIABLE}" if named else "fix the installation of libjpeg-turbo"
        return f"the library does not load ({error})", remedy
    try:
        why = disagreement(library)
    except (OSError, KeyError, ValueError) as error:  # a Pillow that was built without JPEG
        return f"it cannot be compared with Pillow ({error})", "install a Pillow that knows JPEG"
    if why:
        return why, "tell the developers; data.decoder = 'pillow' is right"
    return library


def _load_named(named: str) -> RegionLibrary:
    if not Path(named).is_file():
        raise OSError(f"{named}: no such file")
    return RegionLibrary(Path(named).absolute())


def _load_built() -> RegionLibrary:
    try:
        return RegionLibrary(cached_library())
    except (OSError, AttributeError):
        # Built for a libjpeg that has gone since: once more, with the one that is here.
        return _load_under_another_name(cached_library(rebuild=True))


def _load_under_another_name(path: Path) -> RegionLibrary:
    """The one that was mapped under this name stays what the name means, until the process ends."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="again-", suffix=".so") as copy:
        copy.write(path.read_bytes())
        copy.flush()
        return RegionLibrary(Path(copy.name))


def region_library() -> RegionLibrary:
    """The library of this machine, built if need be; RegionUnavailableError with the reason."""
    found = _found(os.environ.get(VARIABLE, ""))
    if isinstance(found, tuple):
        raise RegionUnavailableError(*found)
    return found


def down_first(width: int, height: int, size: int) -> bool:
    """Whether Pillow resamples rows before columns, for a result of `size` × `size`.

    Levels are rounded between the passes, so the order shows in the pixels. Until version 12
    columns go first; from 13 on rows do where the height shrinks by more than twice what the width
    shrinks by. Pillow itself is tried, not its version.
    """
    return height > size and height - size > 2 * (width - size) and _pillow_looks_at_the_size()


@functools.cache
def _pillow_looks_at_the_size() -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (96, 17), dtype=np.uint8)
    image, bilinear = Image.fromarray(noise), Image.Resampling.BILINEAR
    # One side at a time there is no order.
    rows_first = image.resize((17, 16), bilinear).resize((16, 16), bilinear)
    return rows_first.tobytes() == image.resize((16, 16), bilinear).tobytes()


# Of the comparison with Pillow.
_SIZE = 12
# Wide, tall, and smaller than the result; a box that is whole, one in the middle, one of fractions.
_SHAPES = ((61, 37), (37, 83), (9, 11))
_BOXES = ((0.0, 0.0, 1.0, 1.0), (0.3, 0.4, 0.8, 0.9), (0.11, 0.0, 0.57, 0.61))
_FLIPPED = Image.Transpose.FLIP_LEFT_RIGHT


def disagreement(library: RegionLibrary) -> str:
    """What differs between the library and this Pillow; empty where nothing does. Takes some 20 ms,
    once a process: Pillow and libjpeg come in versions that no test has seen, and a training must
    not change with them."""
    for at, (width, height) in enumerate(_SHAPES):
        for kind, data in enumerate(_files(width, height)):
            for number, name in enumerate(RESAMPLING, start=at + kind):
                channels, flip = (1, 3, 3)[(number + at) % 3], number % 2 == 1
                if not _agrees(library, data, _BOXES[number % 3], name, channels, flip):
                    return f"its pixels differ from those of Pillow {PIL.__version__} ({name})"
    return ""


def _files(width: int, height: int) -> list[bytes]:
    """4:4:4, 4:2:2, 4:2:0, 4:4:0, progressive and grey."""
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
    """Pillow writes no 4:4:0. With sides and factors exchanged, the blocks of 4:2:2 make such a
    file."""
    frame = wide.index(b"\xff\xc0")
    height, width = wide[frame + 5 : frame + 7], wide[frame + 7 : frame + 9]
    start, rest = wide[: frame + 5], wide[frame + 12 :]
    return start + width + height + wide[frame + 9 : frame + 11] + b"\x12" + rest


def _agrees(
    library: RegionLibrary,
    data: bytes,
    share: tuple[float, float, float, float],
    name: str,
    channels: int,
    flip: bool,
) -> bool:
    """The file, and its pixels as a cache keeps them."""
    opened = Image.open(io.BytesIO(data))
    image = opened.convert(MODES[channels])
    left, top, right, bottom = share
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
