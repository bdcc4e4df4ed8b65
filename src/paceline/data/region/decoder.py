"""`Decoder`: one thread's memory in the region decoder's library, given back with the thread.

In: the library's functions. Out: a handle for them. OSError where its libjpeg does not fit.
"""

from __future__ import annotations

import ctypes


class Decoder:
    """`handle` is good as long as this lives."""

    def __init__(self, library: ctypes.CDLL) -> None:
        handle = library.region_open()
        if not handle:
            raise OSError("its libjpeg is another one than it was built for")
        self.handle = int(handle)
        self._close = library.region_close

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            self._close(handle)
