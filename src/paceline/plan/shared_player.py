"""Plays schedules where ranks share cores and nodes share links, and fits the prices of that.

In: every rank's messages (`paceline.plan.schedules`, in segments, as over Gloo), where the ranks are, and
prices. Out: seconds until the last rank has ended. Each end of a message keeps a core busy for a while,
and cores serve in the order of asking. Bytes flow at fair rates (max-min) on the cores that ends leave,
but never on less than a fair share of all. Between two ranks there is one connection, on which messages
follow one another. A limit: no end is slower for bytes beside it, so that the two may take more than
there is, less than twice as much. Where ends shared their cores with bytes, measured times were met
clearly worse: what is charged for an end seems to be a wait in part.

`FittedCosts` finds the prices from measured times (place, algorithm, bytes, seconds). All but the prices
follows from the schedule, so what was measured on some sizes, ranks and links predicts others. Each
algorithm has prices of its own, because a byte costs less where few flow at once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.plan.schedules import NATIVE, algorithm
from paceline.plan.steps import MIB, Groups, Receive, Segment, Send, cut, interleave

Floats = npt.NDArray[np.float64]
_WIDTH = 4
_Channel = tuple[int, int, int]


class Message(NamedTuple):
    """To `peer` where `sent`, else from it. Messages of one lane between two ranks stay in order."""

    sent: bool
    peer: int
    elements: int
    lane: int


def messages(name: str, rank: int, groups: Groups, length: int) -> Iterator[Message]:
    """What one rank sends and waits for of a float32 buffer, in order, as over Gloo: in segments."""
    if name == NATIVE:
        yield from _gloo_ring(rank, len(groups.order), length)
        return
    chosen, width = algorithm(name), len(groups.columns)
    cuts = chosen.segments(length, _WIDTH)
    rounds = [
        chosen.rounds(rank, groups, Segment(stop - start, _WIDTH, number % width))
        for number, (start, stop) in enumerate(cuts)
    ]
    for segment, lane, at in interleave([len(r) for r in rounds], min(chosen.depth, len(cuts))):
        for step in rounds[segment][at]:
            if isinstance(step, Send):
                yield Message(True, step.peer, step.span[1] - step.span[0], lane)
            elif isinstance(step, Receive):
                for peer in step.peers:
                    yield Message(False, peer, step.span[1] - step.span[0], lane)


def _gloo_ring(rank: int, ranks: int, length: int) -> Iterator[Message]:
    """Gloo's own: both ways around in two segments a rank or more, each of which leaves once the one two
    before it has come."""
    each = max(2, -(-length * _WIDTH // (ranks * MIB)))
    sizes = [stop - start for start, stop in cut((0, length), ranks * each)]
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    for first in (rank, rank + 1):
        count = (ranks - 1) * each
        sent = [((first - 1 - i // each) % ranks) * each + i % each for i in range(count)]
        came = [((first - 2 - i // each) % ranks) * each + i % each for i in range(count)]
        for i in range(count + 2):
            if i >= 2 and sizes[came[i - 2]]:
                yield Message(False, before, sizes[came[i - 2]], 0)
            if i < count and sizes[sent[i]]:
                yield Message(True, after, sizes[sent[i]], 0)


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

    @property
    def groups(self) -> Groups:
        return Groups.of_nodes([self.ranks_per_node] * self.nodes)


@dataclass(frozen=True)
class Prices:
    """Seconds of a core: for a rank's call, for either end of a message and for a byte, both between
    nodes and inside one."""

    call_s: float
    message_between_s: float
    message_inside_s: float
    byte_between_s: float
    byte_inside_s: float


def play_shared(sent: Sequence[Sequence[Message]], place: Place, prices: Prices) -> float:
    """Seconds from the common start to the last rank's end; `sent` has every rank's messages."""
    return _SharedPlayer(sent, place, prices).run()


class _SharedPlayer:
    def __init__(self, sent: Sequence[Sequence[Message]], place: Place, prices: Prices) -> None:
        self._place, self._prices = place, prices
        self._left = [iter(one) for one in sent]
        self._unfinished = set(range(len(sent)))
        self._now, self._events = 0.0, [(0.0, 0, _nothing)]
        self._number = 0
        self._cores = place.cores
        self._asking: deque[tuple[float, Callable[[], None]]] = deque()
        self._flows: list[Flow] = []
        self._queues: dict[tuple[int, int], deque[Flow]] = {}
        self._there: dict[_Channel, int] = {}
        self._awaited: dict[_Channel, int] = {}
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
            stuck = sorted(self._unfinished)
            raise ValueError(f"messages: ranks {stuck} wait for a message that is never sent")
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

    def _arrive(self, channel: _Channel) -> None:
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


# From what order of magnitude on the search begins: a few system calls, some memory traffic.
_FIRST = Prices(5e-4, 1e-4, 5e-5, 1e-8, 3e-9)
_ROUNDS = 12
_NUDGE = 0.05


@dataclass(frozen=True)
class Sample:
    place: Place
    algorithm: str
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class FittedCosts:
    """`prices` by algorithm; `spread` is the relative root mean square of what the fit missed."""

    prices: dict[str, Prices]
    spread: float

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> FittedCosts:
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            if not (sample.seconds > 0 and math.isfinite(sample.seconds)):
                raise ConfigError("seconds", sample.seconds, "must be above 0", "measure it again")
            if not (sample.size_bytes > 0 and math.isfinite(sample.size_bytes)):
                raise ConfigError("size_bytes", sample.size_bytes, "must be above 0",
                                  "leave out what sends nothing")  # fmt: skip
            if sample.place.ranks < 2:
                raise ConfigError("place.ranks", sample.place.ranks, "must be 2 or more",
                                  "leave out what was measured on one rank")  # fmt: skip
            by_name.setdefault(sample.algorithm, []).append(sample)
        if not by_name:
            raise ConfigError(
                "samples", None, "none given", "measure with paceline bench allreduce"
            )
        prices, missed = {}, []
        for name, rows in by_name.items():
            prices[name], away = _fit(rows)
            missed.append(away)
        return cls(prices, float(np.sqrt(np.mean(np.concatenate(missed) ** 2))))

    def seconds(self, algorithm: str, place: Place, sizes: npt.ArrayLike) -> Floats:
        if algorithm not in self.prices:
            raise ConfigError(
                "algorithm", algorithm, "was not measured", nearest(algorithm, tuple(self.prices))
            )
        m = np.asarray(sizes, dtype=np.float64)
        found = [_seconds(algorithm, place, size, self.prices[algorithm]) for size in m.ravel()]
        return np.array(found).reshape(m.shape)


def _seconds(algorithm: str, place: Place, size_bytes: float, prices: Prices) -> float:
    if size_bytes <= 0 or place.ranks == 1:
        return 0.0
    return play_shared(_messages(algorithm, place.groups, math.ceil(size_bytes)), place, prices)


@lru_cache(maxsize=1024)
def _messages(name: str, groups: Groups, size_bytes: int) -> list[list[Message]]:
    length = max(1, size_bytes // _WIDTH)
    return [list(messages(name, rank, groups, length)) for rank in groups.order]


def _fit(samples: Sequence[Sample]) -> tuple[Prices, Floats]:
    """The prices, and the relative error that each sample is left with."""
    logs = np.log([sample.seconds for sample in samples])

    def errors(x: Floats) -> Floats:
        prices = Prices(*(float(value) for value in np.exp(x)))
        found = [_seconds(s.algorithm, s.place, s.size_bytes, prices) for s in samples]
        return np.asarray(np.log(found) - logs)

    best, away = _least_squares(errors, np.log(astuple(_FIRST)))
    return Prices(*(float(value) for value in np.exp(best))), np.expm1(away)


def _least_squares(errors: Callable[[Floats], Floats], x: Floats) -> tuple[Floats, Floats]:
    """Gauss and Newton's, damped (Levenberg and Marquardt): a step is taken where it helps."""
    away, damping = errors(x), 1e-2
    for _ in range(_ROUNDS):
        nudged = [errors(x + _NUDGE * unit) for unit in np.eye(len(x))]
        slope = np.stack([(one - away) / _NUDGE for one in nudged], axis=1)
        while damping < 1e4:
            normal = slope.T @ slope + damping * np.eye(len(x))
            step = np.clip(np.linalg.solve(normal, -slope.T @ away), -1.0, 1.0)
            now = errors(x + step)
            if now @ now < away @ away:
                break
            damping *= 5
        else:
            break
        gain = 1 - (now @ now) / (away @ away)
        x, away, damping = x + step, now, max(damping / 5, 1e-4)
        if gain < 1e-4 or away @ away < 1e-18:
            break
    return x, away
