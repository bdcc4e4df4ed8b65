"""Plays scripts: how long an all-reduce takes where ranks share cores and nodes share links.

In: every rank's messages, where the ranks are, and prices. Out: seconds until the last rank is through.
Each end of a message keeps a core busy for a while, and cores serve in the order of asking. Bytes flow at
fair rates on the cores that ends leave, but never on less than a fair share of all. Between two ranks
there is one connection, on which messages follow one another. A limit: no end is slower for bytes beside
it, so that the two may take more than there is, less than twice as much. Where ends shared their cores
with bytes, measured times were met clearly worse: what is charged for an end seems to be a wait in part.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.plan.fair_flows import Flow, FlowLink, next_change_s, pass_time, share
from paceline.plan.rank_rounds import Lane, Message

_WIDTH = 4
Channel = tuple[int, int, Lane]


@dataclass(frozen=True)
class Place:
    """`link_s` is the time a byte takes on a node's link, either way; 0 with one node. `cores` serve
    all ranks together, as on an emulated cluster; `burst_bytes` pass a link that has rested at once."""

    nodes: int
    ranks_per_node: int
    link_s: float
    cores: int = 2
    burst_bytes: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Prices:
    """Seconds of a core: for a rank's call, for either end of a message and for a byte, both between
    nodes and inside one."""

    call_s: float
    message_between_s: float
    message_inside_s: float
    byte_between_s: float
    byte_inside_s: float


def play(scripts: Sequence[Sequence[Message]], place: Place, prices: Prices) -> float:
    """Seconds from the common start to the last rank's end."""
    return _Player(scripts, place, prices).run()


class _Player:
    def __init__(self, scripts: Sequence[Sequence[Message]], place: Place, prices: Prices) -> None:
        self._place, self._prices = place, prices
        self._left = [iter(script) for script in scripts]
        self._unfinished = set(range(len(scripts)))
        self._now, self._events = 0.0, [(0.0, 0, _nothing)]
        self._number = 0
        self._cores = place.cores
        self._asking: deque[tuple[float, Callable[[], None]]] = deque()
        self._flows: list[Flow] = []
        self._queues: dict[tuple[int, int], deque[Flow]] = {}
        self._there: dict[Channel, int] = {}
        self._awaited: dict[Channel, int] = {}
        rate = 1 / place.link_s if place.link_s else 1e15
        self._out, self._into = (
            [FlowLink(rate, place.burst_bytes) for _ in range(place.nodes)] for _ in range(2)
        )
        self._links = [*self._out, *self._into]
        self._changed = False

    def run(self) -> float:
        for rank in range(len(self._left)):
            self._ask(self._prices.call_s, partial(self._proceed, rank))
        while self._events or self._flows:
            if self._changed:
                share(self._flows, self._links, self._cores_for_bytes())
                self._changed = False
            step = next_change_s(self._flows, self._links)
            due = self._events[0][0] - self._now if self._events else float("inf")
            if due <= step:
                self._pass(max(0.0, due))
                heapq.heappop(self._events)[2]()
            else:
                self._pass(step)
                self._changed = True
                self._end_flows()
        if self._unfinished:
            ranks = ", ".join(str(rank) for rank in sorted(self._unfinished))
            raise ValueError(f"scripts: rank {ranks} waits for a message that is never sent")
        return self._now

    def _cores_for_bytes(self) -> float:
        flows, busy = len(self._flows), self._place.cores - self._cores
        fair = self._place.cores * flows / (flows + busy) if flows else 0.0
        return max(self._cores, fair)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        pass_time(self._flows, self._links, seconds)

    def _at(self, seconds: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now + seconds, self._number, then))

    def _ask(self, seconds: float, then: Callable[[], None]) -> None:
        """A core's time, then `then`."""
        self._asking.append((seconds, then))
        self._serve()

    def _serve(self) -> None:
        while self._asking and self._cores:
            self._cores -= 1
            self._changed = True
            seconds, then = self._asking.popleft()
            self._at(seconds, partial(self._served, then))

    def _served(self, then: Callable[[], None]) -> None:
        self._cores += 1
        self._changed = True
        then()
        self._serve()

    def _proceed(self, rank: int) -> None:
        """To the rank's next message."""
        message = next(self._left[rank], None)
        if message is None:
            self._unfinished.remove(rank)
            return
        if message.sent:
            self._ask(self._end_s(rank, message.peer), partial(self._send, rank, message))
            return
        channel = (message.peer, rank, message.lane)
        if self._there.get(channel, 0):
            self._there[channel] -= 1
            self._ask(self._end_s(rank, message.peer), partial(self._proceed, rank))
        else:
            self._awaited[channel] = rank

    def _send(self, rank: int, message: Message) -> None:
        here, there = (r // self._place.ranks_per_node for r in (rank, message.peer))
        links = () if here == there else (self._out[here], self._into[there])
        cpu_s = self._prices.byte_between_s if links else self._prices.byte_inside_s
        flow = Flow(float(message.elements * _WIDTH), cpu_s, links,
                    (rank, message.peer, message.lane))  # fmt: skip
        queue = self._queues.setdefault((rank, message.peer), deque())
        queue.append(flow)
        if len(queue) == 1:
            self._flows.append(flow)
            self._changed = True
        self._proceed(rank)

    def _end_flows(self) -> None:
        for flow in [flow for flow in self._flows if flow.left <= 1e-6]:
            self._flows.remove(flow)
            queue = self._queues[flow.what[:2]]
            queue.popleft()
            if queue:
                self._flows.append(queue[0])
            self._arrive(flow.what)

    def _arrive(self, channel: Channel) -> None:
        rank = self._awaited.pop(channel, None)
        if rank is None:
            self._there[channel] = self._there.get(channel, 0) + 1
        else:
            self._ask(self._end_s(rank, channel[0]), partial(self._proceed, rank))

    def _apart(self, one: int, other: int) -> bool:
        return one // self._place.ranks_per_node != other // self._place.ranks_per_node

    def _end_s(self, rank: int, peer: int) -> float:
        """Of a core, for one end of a message."""
        prices = self._prices
        return prices.message_between_s if self._apart(rank, peer) else prices.message_inside_s


def _nothing() -> None:
    """At the start."""
