"""Finds what a cluster has left on the machine; and helpers of its tests."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.cluster.network import Namespace

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent
# A machine that is busy with other things takes its time to import torch.
PATIENCE_S = 200.0
RANK_ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)])}


def traces(names: Iterable[str]) -> list[str]:
    """Returns the namespaces and folders of these names that exist."""
    found = [name for name in names if Namespace(name).exists()]
    tags = {name.rpartition("-")[0] for name in names}
    return found + [tag for tag in tags if (Path(tempfile.gettempdir()) / tag).exists()]


def living(pids: Iterable[int]) -> list[int]:
    """Returns the processes that run; zombies do not count."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def assert_end(pids: Iterable[int]) -> None:
    """A process that was killed takes a moment to go."""
    pids, deadline = list(pids), time.monotonic() + 100
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not living(pids)


def root_interfaces() -> list[str]:
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def hear_signals_as_usual() -> None:
    """Restores signals that the parent process may ignore, as nohup and a shell's background do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
