"""`HostLink`: the cable between a host and the switch.

In: the two namespaces, the host's number and a rate. Out: a veth pair that carries no more than the rate
in either direction, and that can be cut and mended.
"""

from __future__ import annotations

import contextlib
import re

from paceline.bench.cluster.namespace import Namespace
from paceline.core.errors import ConfigError, LaunchError

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
