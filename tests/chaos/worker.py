"""One worker process of `python -m chaos`, with a fork server of its own."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from chaos.job import descendants
from chaos.trial import Measured, Trial
from fork_server import ForkServer

_server: ForkServer


def set_up() -> None:
    """A worker of the pool: a fork server of its own, and an end that takes all processes along."""
    global _server
    _server = ForkServer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's owner ends its workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    multiprocessing.util.Finalize(None, _kill_all, exitpriority=1)


def _kill_all() -> None:
    for pid in descendants(_server.pid):
        os.kill(pid, signal.SIGKILL)


def run_trial(
    seed: int,
    ranks: tuple[int, ...],
    left_out: dict[str, str],
    root: Path,
    until: float,
    number: int,
) -> dict[str, Any] | None:
    """Its record; None where there was no time left for it."""
    if time.monotonic() > until:
        return None
    references = Measured(_server, root / "references")
    trial = Trial(_server, seed, number, references, root, left_out, ranks)
    try:
        record = trial.run()
    except Exception as error:
        known = {"seed": seed, "trial": number, "ranks": 0, "attempts": []} | trial.record
        record = known | {"violations": [f"the harness itself failed: {error!r}"]}
        _kill_all()
    if not record["violations"]:
        for folder in (root / f"trial-{number}", root / f"trial-{number}-logs"):
            shutil.rmtree(folder, ignore_errors=True)
    return record
