"""`CauseClock`: what the time of the input pipeline goes into.

In: seconds spent by threads, each for a cause: read, decode, augment or copy. Out: what this thread spent
since it last asked, so that whoever runs a piece of work knows what that piece cost, and shares of a
wait: a wait for a batch is put down to what making that batch took.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

CAUSES = ("read", "decode", "augment", "copy")
# A wait for work that named no cause.
OTHER = "other"


class CauseClock:
    """Used by many threads at once; each sees its own seconds only, so there is no lock to wait for."""

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, cause: str, seconds: float) -> None:
        spent: dict[str, float] = self._local.__dict__.setdefault("spent", {})
        spent[cause] = spent.get(cause, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What this thread spent since its last `take`."""
        found: dict[str, float] = self._local.__dict__.pop("spent", {})
        return found


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by cause, over all parts."""
    total: dict[str, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def shared_out(wait_s: float, spent: Mapping[str, float]) -> dict[str, float]:
    """A wait, divided among the causes in proportion to what they took."""
    whole = sum(spent.values())
    if wait_s <= 0:
        return {}
    if whole <= 0:
        return {OTHER: wait_s}
    return {cause: wait_s * seconds / whole for cause, seconds in spent.items() if seconds > 0}
