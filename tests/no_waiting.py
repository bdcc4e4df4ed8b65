"""`no_waiting`: whatever makes the host wait for the GPU raises inside of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # torch calls the mode a prototype, once: as an error it would leave the mode on for good.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
