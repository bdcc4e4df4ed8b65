"""`RegionLibrary`: the C library of the region decoder, called without the interpreter's lock.

In: PACELINE_JPEG_REGION_LIBRARY, or nothing: then a library is built. Out: functions that fill pixels, or
RegionUnavailableError with the reason. A library that does not give this Pillow's very pixels counts
as none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError
from paceline.data.augmentation.augment import Box, Pixels
from paceline.data.region.agreement import disagreement
from paceline.data.region.array_memory import (
    TALLEST,
    address,
    addresses_of_squares,
    check_square,
    is_image,
)
from paceline.data.region.build import BuildError
from paceline.data.region.cache import cached_library
from paceline.data.region.decoder import Decoder
from paceline.data.region.functions import load_functions
from paceline.data.region.pass_order import down_first
from paceline.data.region.pieces import Pieces
from paceline.data.settings import INTERPOLATIONS
from paceline.data.stored_files import StoredFiles

VARIABLE = "PACELINE_JPEG_REGION_LIBRARY"
_FILTERS = {name: number for number, name in enumerate(INTERPOLATIONS)}


class RegionUnavailableError(PacelineError):
    """There is no region decoder here; cause and remedy."""


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
        """Fills `out` with `box` of the image, whose `size` is `shape`. False where the file is not as
        it should be; then there may be anything in `out`."""
        check_square(out)
        rows, _, channels = out.shape
        outcome: int = self._library.region_prepare(
            self._decoder(), data, len(data), *box, flip, rows, _FILTERS[interpolation],
            down_first(*shape, rows), channels, address(out),
        )  # fmt: skip
        return outcome == 0

    def square(self, pixels: Pixels, box: Box, flip: bool, interpolation: str, out: Pixels) -> bool:
        """Fills `out` with `box` of an image that is decoded already. False where the array is not one
        that this library takes; then there may be anything in `out`."""
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
        held: Decoder | None = getattr(self._local, "decoder", None)
        if held is None:
            held = self._local.decoder = Decoder(self._library)
        return held.handle


@functools.cache
def _found(named: str) -> RegionLibrary | tuple[str, str]:
    """Or cause and remedy. No exception is kept: its traceback would keep alive all that it passed."""
    try:
        library = _load_named(named) if named else _load_built()
    except BuildError as error:
        return error.cause, error.remedy
    except (OSError, AttributeError) as error:
        remedy = f"check {VARIABLE}" if named else "mend the installation of libjpeg-turbo"
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
