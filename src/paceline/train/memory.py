"""Running out of memory: how to tell it from other errors.

In: what a forward or backward pass raised, and words for the user. Out: the error that says them, or
None where it was something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.errors import RunError


def memory_error(error: Exception, where: str, remedy: str) -> RunError | None:
    """On GPU and CPU alike; the CPU allocator raises a plain RuntimeError."""
    told = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not told and "can't allocate memory" not in str(error):
        return None
    return RunError(f"out of memory {where}", remedy)


@contextmanager
def memory_told(where: str, remedy: str) -> Iterator[None]:
    """Within this context running out of memory is the error that says so; others stay what they are."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        fault = memory_error(error, where, remedy)
        if fault is None:
            raise
        raise fault from error
