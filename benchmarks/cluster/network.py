"""Network namespaces and links of an emulated cluster, made with iproute2's `ip` and `tc`.

Names carry an owner tag with the process id and its start time, because process ids are reused; so
namespaces of a killed owner can be found and removed.
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
from paceline.core.host import process_ids, process_stat

INTERFACE = "eth0"
SWITCH = "switch0"
_SUBNET = "10.213.0"  # only inside the namespaces
MAX_HOSTS = 250
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
# A queue longer than 50 ms would hide losses that a real switch has.
_BUCKET = ("burst", "32kb", "latency", "50ms")
_NAMES = Path("/var/run/netns")
_KILL_LIMIT_S = 10.0
_POLL_S = 0.01
_TAG = re.compile(r"paceline-(\d+)-(\d+)-\d+(?:-|$)")
_serials = itertools.count()
_LIMIT_S = 20.0


def find_tool(name: str) -> str | None:
    """The path of a tool on the PATH or in /usr/sbin or /sbin."""
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
            # Ctrl-C is handled by the cluster's owner.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shown}: {error}", "install iproute2 and run as root") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise LaunchError(f"{shown}: {reason}")


def new_tag() -> str:
    pid = os.getpid()
    return f"paceline-{pid}-{_start(pid)}-{next(_serials)}"


def owner_is_gone(name: str) -> bool:
    """Returns True if the owner of a tagged name has ended; False for names without our tag."""
    found = _TAG.match(name)
    return found is not None and _start(int(found[1])) != found[2]


def _start(pid: int) -> str | None:
    """Start time of a running process; None if there is none."""
    found = process_stat(pid)
    return None if found is None or found.has_ended else found.start


class Namespace:
    """A network namespace, created by `add`; `remove` kills every process inside."""

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
        """The command line that runs `command` inside; the process id stays that of `ip`."""
        return [find_tool("ip") or "ip", "netns", "exec", self.name, *command]

    def processes(self, mark: str = "") -> list[int]:
        """Running processes inside whose initial environment contains `mark`."""
        try:
            ours = (_NAMES / self.name).stat()
        except OSError:
            return []
        found = []
        for pid in process_ids():
            with contextlib.suppress(OSError):
                inside = os.path.samestat(Path(f"/proc/{pid}/ns/net").stat(), ours)
                if inside and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def kill(self, mark: str = "") -> None:
        """Kills these processes, including those that they fork."""
        deadline = time.monotonic() + _KILL_LIMIT_S
        while pids := self.processes(mark):
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.name}: processes {pids} do not end", "kill them yourself")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def remove(self) -> None:
        """Removes the namespace with both ends of its links."""
        if not self.exists():
            return
        self.kill()
        try:
            call_tool("ip", "netns", "delete", self.name)
        except LaunchError:
            # Another process may have removed it already.
            if self.exists():
                raise


def abandoned_namespaces() -> list[Namespace]:
    """Namespaces of clusters whose owner has ended."""
    names = sorted(entry.name for entry in _NAMES.iterdir()) if _NAMES.is_dir() else []
    return [Namespace(name) for name in names if owner_is_gone(name)]


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
    """A veth pair between host `number` and a port of the switch, with a rate limit in both
    directions."""

    def __init__(self, switch: Namespace, host: Namespace, number: int) -> None:
        self._switch, self._host = switch, host
        self._port = f"port{number}"
        self._address = host_address(number)

    def make(self) -> None:
        switch, host = self._switch, self._host
        # Created inside the namespaces: the root namespace never sees either end.
        switch.ip("link", "add", self._port, "type", "veth",
                  "peer", "name", INTERFACE, "netns", host.name)  # fmt: skip
        # No IPv6 addresses, whose discovery would load a slow link.
        switch.ip("link", "set", self._port, "master", SWITCH, "addrgenmode", "none", "up")
        host.ip("link", "set", INTERFACE, "addrgenmode", "none", "up")
        host.ip("address", "add", f"{self._address}/24", "dev", INTERFACE)

    def shape(self, rate: str | None) -> None:
        """Sets the rate at both ends, because a queue limits only sending; None removes the limit."""
        for end, device in ((self._host, INTERFACE), (self._switch, self._port)):
            if rate is not None:
                bits = f"{bits_per_s(rate):.0f}bit"
                end.tc("qdisc", "replace", "dev", device, "root", "tbf", "rate", bits, *_BUCKET)
            else:
                with contextlib.suppress(LaunchError):  # there was no limit
                    end.tc("qdisc", "delete", "dev", device, "root")

    def cut(self) -> None:
        """Drops all packets without notifying either side, like a pulled cable."""
        self._switch.ip("link", "set", self._port, "down")

    def reconnect(self) -> None:
        self._switch.ip("link", "set", self._port, "up")


def make_switch(switch: Namespace) -> None:
    switch.ip("link", "add", SWITCH, "type", "bridge")
    switch.ip("link", "set", SWITCH, "addrgenmode", "none", "up")


def why_unavailable() -> str:
    """Why this machine cannot emulate a cluster; empty if it can. Privileges are tried out, because
    containers remove them in many ways."""
    return missing_prerequisite() or _failed_trial()


def missing_prerequisite() -> str:
    """A reason that can be found without trying; empty if there is none."""
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
