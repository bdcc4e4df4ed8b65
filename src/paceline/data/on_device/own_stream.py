"""Work on a GPU beside the training: streams of one's own, and marks on the training's.

In: a device. Out: contexts and waits. Memory that a stream of one's own gives back goes to that stream's
next user only, so it must be done with it: hence waits for the end. On a CPU, where tests stand in for a
GPU, all of these do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def drained_stream(device: torch.device) -> Iterator[None]:
    """A new stream, all of whose work is done when the context ends: the training's neither waits for it
    nor shares memory with it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # torch has a few streams and hands them out in turn: somebody may have work there.
        finish(stream)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                finish(stream)


def finish(stream: torch.cuda.Stream | None) -> None:
    """Sleeps until the stream is done, where waiting would by default keep a core busy."""
    if stream is not None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()


def finish_current(device: torch.device) -> None:
    if device.type == "cuda":
        finish(torch.cuda.current_stream(device))


def marked(device: torch.device) -> Any:
    """An event behind all that the current stream was given so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
