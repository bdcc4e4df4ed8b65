"""Flows of bytes that share links and cores, each as fast as is fair to the others (max-min).

In: flows, with the links that each one crosses and what a byte costs a core. Out: their rates, when the
next one ends or a link's burst is used up, and what is left of them then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ENOUGH = 1e-9
_NO_LIMIT = 1e15


class FlowLink:
    """One way of one node's link. `spare` bytes may pass at any rate; then `rate` holds."""

    __slots__ = ("_most", "load", "rate", "room", "spare", "users")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self._most, self.spare = rate, burst, burst
        self.load = self.room = 0.0
        self.users = 0

    def pass_time(self, seconds: float) -> None:
        left = self.spare + (self.rate - self.load) * seconds
        # What is left of a burst by rounding would only make steps without end.
        self.spare = 0.0 if left < 1e-3 else min(self._most, left)


class Flow:
    """`left` bytes on their way; `cpu_s` is a core's time for one of them, at both ends together."""

    __slots__ = ("cpu_s", "left", "links", "rate", "what")

    def __init__(self, left: float, cpu_s: float, links: Sequence[FlowLink], what: Any) -> None:
        self.left, self.cpu_s, self.links, self.what = left, cpu_s, links, what
        self.rate = 0.0


def share(flows: Sequence[Flow], links: Sequence[FlowLink], cores: float) -> None:
    """Sets all rates: they rise together, and stop one after the other where a limit is reached."""
    for link in links:
        link.room = float("inf") if link.spare > 0 else link.rate
        link.load, link.users = 0.0, 0
    for flow in flows:
        for link in flow.links:
            link.users += 1
    open_flows, level, cpu = list(flows), 0.0, float(cores)
    while open_flows:
        work = sum(flow.cpu_s for flow in open_flows)
        most = min(_most(flow) for flow in open_flows)
        rise = min(most - level, cpu / work if work else _NO_LIMIT)
        rise = min([rise, *(link.room / link.users for link in links if link.users)])
        level += rise
        cpu -= rise * work
        for link in links:
            link.room -= rise * link.users
        full = cpu <= _ENOUGH * cores
        still = []
        for flow in open_flows:
            tight = any(link.room <= _ENOUGH * link.rate for link in flow.links)
            if tight or (full and flow.cpu_s) or level >= _most(flow) * (1 - _ENOUGH):
                flow.rate = level
                for link in flow.links:
                    link.users -= 1
                    link.load += level
            else:
                still.append(flow)
        open_flows = still


def _most(flow: Flow) -> float:
    """Either end is one thread: a flow cannot have more than two cores' time."""
    return 2 / flow.cpu_s if flow.cpu_s else _NO_LIMIT


def next_change_s(flows: Sequence[Flow], links: Sequence[FlowLink]) -> float:
    """Until a flow ends or a burst is used up."""
    ends = [flow.left / flow.rate for flow in flows]
    bursts = [link.spare / (link.load - link.rate) for link in links
              if link.spare > 0 and link.load > link.rate]  # fmt: skip
    return min([*ends, *bursts], default=float("inf"))


def pass_time(flows: Sequence[Flow], links: Sequence[FlowLink], seconds: float) -> None:
    for flow in flows:
        flow.left -= flow.rate * seconds
    for link in links:
        link.pass_time(seconds)
