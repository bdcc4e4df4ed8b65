"""iproute2's `ip` and `tc`, called as programs.

In: their arguments. Out: nothing, or an error of one line with what they said.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paceline.core.errors import ConfigError, LaunchError

_LIMIT_S = 20.0


def find_tool(name: str) -> str | None:
    """Its path. The folders of administration count also where they are not on the PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin:/sbin"]))


def call_tool(name: str, *arguments: str) -> None:
    command = [find_tool(name) or name, *arguments]
    shown = " ".join([name, *arguments])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            # A Ctrl-C is for the cluster's owner, who tears down; not for a tool at its work.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shown}: {error}", "install iproute2 and run as root") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else f"exit code {done.returncode}"
        raise LaunchError(f"{shown}: {said}")


# Owner tags: names that say which process made a thing.
#
# In: this process, or the name of a thing found on the machine. Out: a tag that no other cluster
# has; whether the process that made the thing is gone. A process id alone does not tell, as ids
# are used again: the tag carries the time at which its process started, too.


_TAG = re.compile(r"paceline-(\d+)-(\d+)-\d+(?:-|$)")
_serials = itertools.count()


def new_tag() -> str:
    pid = os.getpid()
    return f"paceline-{pid}-{_start_ticks(pid)}-{next(_serials)}"


def owner_is_gone(name: str) -> bool:
    """False, too, for names that are not ours: those are nobody's to remove."""
    found = _TAG.match(name)
    return found is not None and _start_ticks(int(found[1])) != int(found[2])


def _start_ticks(pid: int) -> int | None:
    """When a living process started, in the kernel's clock ticks; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


# `Namespace`: a network namespace under iproute2's care.
#
# In: a name. Out: a network stack of its own, in which programs can be started; on removal every
# process inside ends, whoever started it.


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


# `HostLink`: the cable between a host and the switch.
#
# In: the two namespaces, the host's number and a rate. Out: a veth pair that carries no more than
# the rate in either direction, and that can be cut and mended.


INTERFACE = "eth0"
SWITCH = "switch0"
_SUBNET = "10.213.0"  # inside the namespaces only, so it can clash with nothing outside
MAX_HOSTS = 250
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
# A queue longer than 50 ms at the rate would hide losses that a real switch has.
_BUCKET = ("burst", "32kb", "latency", "50ms")


def bits_per_s(rate: str) -> float:
    """`200mbit` → 2e8."""
    found = _RATE.fullmatch(rate)
    bits = float(found[1]) * _FACTORS[found[2]] if found else 0.0
    if bits < 1000:
        raise ConfigError("rate", rate, "is not a rate of a link", "write 200mbit or 1gbit")
    return bits


def host_address(number: int) -> str:
    return f"{_SUBNET}.{number + 1}"


class HostLink:
    """Host `number`'s; the other end is a port of the switch."""

    def __init__(self, switch: Namespace, host: Namespace, number: int) -> None:
        self._switch, self._host = switch, host
        self._port = f"port{number}"
        self._address = host_address(number)

    def make(self) -> None:
        switch, host = self._switch, self._host
        # Made where its ends belong: the root namespace never sees either.
        switch.ip("link", "add", self._port, "type", "veth",
                  "peer", "name", INTERFACE, "netns", host.name)  # fmt: skip
        # No IPv6 addresses: their discovery would take its share of a slow link.
        switch.ip("link", "set", self._port, "master", SWITCH, "addrgenmode", "none", "up")
        host.ip("link", "set", INTERFACE, "addrgenmode", "none", "up")
        host.ip("address", "add", f"{self._address}/24", "dev", INTERFACE)

    def shape(self, rate: str | None) -> None:
        """Both ends, because a queue limits only what is sent. None takes the limit away."""
        for end, device in ((self._host, INTERFACE), (self._switch, self._port)):
            if rate is not None:
                bits = f"{bits_per_s(rate):.0f}bit"
                end.tc("qdisc", "replace", "dev", device, "root", "tbf", "rate", bits, *_BUCKET)
            else:
                with contextlib.suppress(LaunchError):  # there was no limit
                    end.tc("qdisc", "delete", "dev", device, "root")

    def cut(self) -> None:
        """As a pulled cable: what is sent is lost, and neither side is told."""
        self._switch.ip("link", "set", self._port, "down")

    def mend(self) -> None:
        self._switch.ip("link", "set", self._port, "up")


def make_switch(switch: Namespace) -> None:
    switch.ip("link", "add", SWITCH, "type", "bridge")
    switch.ip("link", "set", SWITCH, "addrgenmode", "none", "up")


# Whether this machine can have an emulated cluster.
#
# In: the machine. Out: nothing to complain of, or the reason in one line. The privileges are
# tried out rather than read off, because containers take them away in many ways.


def why_unavailable() -> str:
    """Empty where clusters can be made; else why not."""
    return missing_prerequisite() or _failed_trial()


def missing_prerequisite() -> str:
    """What can be told without trying."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "not root: network namespaces and tc need it"
    missing = [name for name in ("ip", "tc") if find_tool(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: install iproute2"
    return ""


def _failed_trial() -> str:
    tag = new_tag()
    switch, host = Namespace(f"{tag}-switch"), Namespace(f"{tag}-host0")
    link = HostLink(switch, host, 0)
    steps: tuple[tuple[str, tuple[Callable[[], None], ...]], ...] = (
        ("network namespaces are not permitted", (switch.add, host.add)),
        ("programs cannot be started in a namespace", (partial(_start_program, host),)),
        ("bridges or veth pairs are not permitted", (partial(make_switch, switch), link.make)),
        ("tc's tbf is missing", (partial(link.shape, "1gbit"),)),
    )
    try:
        for problem, calls in steps:
            try:
                for call in calls:
                    call()
            except LaunchError as error:
                return f"{problem} ({error})"
        return ""
    finally:
        for namespace in (host, switch):
            with contextlib.suppress(LaunchError):
                namespace.remove()


def _start_program(host: Namespace) -> None:
    call_tool("ip", *host.command(["true"])[1:])
