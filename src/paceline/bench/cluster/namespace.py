"""`Namespace`: a network namespace under iproute2's care.

In: a name. Out: a network stack of its own, in which programs can be started; on removal every process
inside ends, whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.cluster.iproute import call_tool, find_tool
from paceline.bench.cluster.owner_tag import owner_is_gone
from paceline.core.errors import LaunchError

_NAMES = Path("/var/run/netns")
_KILL_LIMIT_S = 10.0
_POLL_S = 0.01


class Namespace:
    """Made by `add`, gone after `remove`; both can be called again."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self) -> None:
        call_tool("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def exists(self) -> bool:
        return (_NAMES / self.name).exists()

    def ip(self, *arguments: str) -> None:
        call_tool("ip", "-n", self.name, *arguments)

    def tc(self, *arguments: str) -> None:
        call_tool("tc", "-n", self.name, *arguments)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside; `ip` becomes it, and keeps its process id."""
        return [find_tool("ip") or "ip", "netns", "exec", self.name, *command]

    def processes(self, mark: str = "") -> list[int]:
        """The living ones inside, or those of them with `mark` in the environment they started with.

        A zombie has left its namespaces already.
        """
        try:
            ours = (_NAMES / self.name).stat()
        except OSError:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    theirs = (entry / "ns/net").stat()
                    inside = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
                    if inside and mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def kill(self, mark: str = "") -> None:
        """Ends these processes, also those that are forked meanwhile."""
        deadline = time.monotonic() + _KILL_LIMIT_S
        while pids := self.processes(mark):
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.name}: processes {pids} do not end", "kill them yourself")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def remove(self) -> None:
        """Its links go with it, at both their ends."""
        if not self.exists():
            return
        self.kill()
        try:
            call_tool("ip", "netns", "delete", self.name)
        except LaunchError:
            # Somebody else who sweeps may have been faster.
            if self.exists():
                raise


def abandoned_namespaces() -> list[Namespace]:
    """Those that a cluster made whose owner is gone."""
    names = sorted(entry.name for entry in _NAMES.iterdir()) if _NAMES.is_dir() else []
    return [Namespace(name) for name in names if owner_is_gone(name)]
