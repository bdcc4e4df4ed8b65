"""Arrays that C reads and writes: whether it may, and where they lie.

In: NumPy arrays. Out: addresses, good as long as the arrays live; ValueError for a place that cannot be
written as a square.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.data.augmentation.augment import Pixels

# Pillow 12 turns to other passes for images that are taller than this many times their width.
TALLEST = 100
# ctypes cuts whole numbers off, and says nothing.
_MOST_BYTES = 2**31 - 1


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
