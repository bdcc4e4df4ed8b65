"""`paceline`, with one scripted fault: faulty.py FAULT RANK COMMAND…

FAULT says what happens on RANK: kill in forward, in an eager collective, in a captured CUDA graph, in an
evaluation or in a save; stop (SIGSTOP); an exception; an illegal memory access. Under torchrun it happens
at the first start only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import faults


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_collective(nth: int, action: Callable[[], None]) -> None:
    """Once the nth all-reduce of the transport has been queued, outside of CUDA graphs."""
    from paceline.comm.planned_transport import NativeTransport

    real, calls = NativeTransport._start, [0]

    def start(self, piece):  # type: ignore[no-untyped-def]
        started = real(self, piece)
        calls[0] += 1
        if calls[0] == nth:
            action()
        return started

    NativeTransport._start = start  # type: ignore[method-assign]


def in_graph(nth: int, action: Callable[[], None]) -> None:
    """Right after the nth replay of a micro-step's CUDA graph, which holds collectives, was launched."""
    from paceline.comm import GradientExchange

    real, replays = GradientExchange.replay, [0]

    def replay(self, *, sends):  # type: ignore[no-untyped-def]
        real(self, sends=sends)
        replays[0] += sends
        if sends and replays[0] == nth:
            action()

    GradientExchange.replay = replay  # type: ignore[method-assign]


def raise_error() -> None:
    raise KeyError("a defect of the test's own")


def illegal_access() -> None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def write(pointer):  # type: ignore[no-untyped-def]
        tl.store(pointer + (1 << 44), 1.0)

    sys.modules[__name__].tl = tl  # type: ignore[attr-defined]
    write[(1,)](torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


FAULTS: dict[str, Callable[[], None]] = {
    "forward": partial(faults.at_micro_batch, 30, 1, kill),
    "collective": partial(in_collective, 5, kill),
    "graph": partial(in_graph, 60, kill),
    "evaluation": partial(faults.at_evaluation, 1, kill),
    "save": partial(faults.at_rename, "step-", 1, kill),
    "stop": partial(faults.at_micro_batch, 30, 1, partial(faults.signal_self, signal.SIGSTOP)),
    "exception": partial(faults.at_micro_batch, 30, 1, raise_error),
    "illegal": partial(faults.at_micro_batch, 30, 1, illegal_access),
}


def main() -> None:
    fault, rank, *command = sys.argv[1:]
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if os.environ["RANK"] == rank and first:
        FAULTS[fault]()
    from paceline.cli.app import main as paceline

    sys.argv = ["paceline", *command]
    paceline()


if __name__ == "__main__":
    main()
