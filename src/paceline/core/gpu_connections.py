"""How many connections a process has to its GPU: queues between its streams and the hardware.

In: the environment. Out: the environment with more of them asked for, and what there are. CUDA has eight
unless told otherwise before it starts. Streams beyond them share one, and what is queued there runs in
the order of its queueing: two dozen streams of a decoder then wait for whole training steps.
"""

from __future__ import annotations

import ctypes
import os

_NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEWEST, _USUAL, _MOST = 2, 8, 32
_DRIVER = "libcuda.so.1"
_NOT_STARTED = 3


def ask_for_connections(sharing: int = 1) -> None:
    """Before anything else asks CUDA. What a user set stays. `sharing`: processes on one GPU, which MPS
    gives about a hundred connections in all; one process too many gets "out of memory"."""
    if _NAME not in os.environ and not _has_started():
        os.environ[_NAME] = str(max(_FEWEST, _MOST // sharing))


def connections() -> str:
    """How many there are, unless somebody set the variable after CUDA had started."""
    return os.environ.get(_NAME, str(_USUAL))


def few_connections() -> str:
    """A remark where there are fewer than there could be; empty otherwise."""
    told = connections()
    if told == str(_MOST):
        return ""
    return f"slower than it could be: set {_NAME}={_MOST}, it is {told}"


def _has_started() -> bool:
    """Even a question for the number of GPUs starts CUDA, and then the environment is not read again."""
    try:
        count = ctypes.CDLL(_DRIVER).cuDeviceGetCount
    except (OSError, AttributeError):  # no NVIDIA GPU
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)
