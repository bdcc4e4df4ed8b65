"""Whether this machine can have an emulated cluster.

In: the machine. Out: nothing to complain of, or the reason in one line. The privileges are tried out
rather than read off, because containers take them away in many ways.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

from paceline.bench.cluster.host_link import HostLink, make_switch
from paceline.bench.cluster.iproute import call_tool, find_tool
from paceline.bench.cluster.namespace import Namespace
from paceline.bench.cluster.owner_tag import new_tag
from paceline.core.errors import LaunchError


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
