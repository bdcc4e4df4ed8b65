"""How many cores this process may use. Nothing in; a count out."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Those that the scheduler, a container or taskset left to us; all where that cannot be asked."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
