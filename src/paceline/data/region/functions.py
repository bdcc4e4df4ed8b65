"""The C functions of the region decoder, with the types that they take and return.

In: the library's file. Out: it, loaded. OSError where that fails, AttributeError where it is another
library, or one of another version of these sources.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

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


def load_functions(path: Path, *, keeping_the_lock: bool = False) -> ctypes.CDLL:
    """`keeping_the_lock`: the interpreter's, while they run; else it is given away."""
    kind = ctypes.PyDLL if keeping_the_lock else ctypes.CDLL
    # Local symbols: Pillow brings a libjpeg too, and neither may call into the other.
    library = kind(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name, (returned, *taken) in _TYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, taken
    return library
