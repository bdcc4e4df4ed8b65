"""`threads_agree`: whether items read by several threads at once are those that one thread reads.

A dataset with one file handle, or one buffer for all items, would give wrong images in silence. Races
are a matter of chance: the check meets those that occur often.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_THREADS, _READS = 4, 4
# Pauses of a thread between the calls that the dataset makes, or short reads would hardly ever meet.
_PAUSES, _PAUSE_S = 200, 1e-5


def threads_agree(read: Callable[[int], object], items: Sequence[int]) -> bool:
    """`read` returns something comparable that shares no memory with other items. An item that fails,
    or differs between two reads of one thread, is left out: it says nothing about threads."""
    wanted = {}
    for i in items:
        try:
            one, two = read(i), read(i)
        except Exception:  # noqa: BLE001  (the user's code; it fails again where the item is used)
            continue
        if one == two:
            wanted[i] = one
    steady = list(wanted)
    if len(steady) < 2:
        return True
    start = threading.Barrier(_THREADS)

    def agrees(thread: int) -> bool:
        pauses = iter(range(_PAUSES))

        def pause(*_: object) -> None:
            if next(pauses, None) is not None:
                time.sleep(_PAUSE_S)

        start.wait()
        sys.setprofile(pause)  # of this thread alone
        try:
            turns = (steady[(thread + turn) % len(steady)] for turn in range(_READS))
            return all(read(i) == wanted[i] for i in turns)
        except Exception:  # noqa: BLE001  (one thread alone could read it)
            return False
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(_THREADS) as threads:
        return all(list(threads.map(agrees, range(_THREADS))))
