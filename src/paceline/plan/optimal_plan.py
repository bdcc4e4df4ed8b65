"""The best buffers: dynamic programming, exact for one channel.

In: when each gradient is ready, and the cost of any run of neighbours. Out: the cuts that end the last
exchange soonest, and a format for each. F(j), the earliest end of the first j gradients, is the least
over i of max(F(i), ready(j)) + cost(i, j): the last buffer holds the gradients i to j. An earlier end of
what came before never makes a later one end later, so the best of the parts is the best of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Cut = tuple[int, int]


class Buffer(NamedTuple):
    cut: Cut
    wire: str


class Costs(NamedTuple):
    """`wires` begin with the most exact; `of` is the seconds of a format and a cut."""

    ready_s: Sequence[float]
    wires: Sequence[str]
    of: Callable[[str, int, int], float]

    def cheapest(self, cut: Cut) -> Buffer:
        return Buffer(cut, min(self.wires, key=lambda wire: self.of(wire, *cut)))

    def seconds(self, buffer: Buffer) -> float:
        return self.of(buffer.wire, *buffer.cut)

    def start_s(self, buffer: Buffer, free_s: float) -> float:
        """When its last gradient is ready and the channel is free."""
        return max(free_s, self.ready_s[buffer.cut[1] - 1])

    def end_s(self, buffers: Sequence[Buffer]) -> float:
        free = 0.0
        for buffer in buffers:
            free = self.start_s(buffer, free) + self.seconds(buffer)
        return free


def optimal_buffers(costs: Costs, seconds: npt.NDArray[np.float64]) -> list[Buffer]:
    """All end as soon as they can in the cheapest formats, `seconds`, and no single one could take a
    more exact format. Joining rounds nothing: each gradient stays at least as exact as it was alone."""
    cheapest = [costs.cheapest(cut) for cut in optimal_cuts(costs.ready_s, seconds)]
    by_s = costs.end_s(cheapest) * (1 + 1e-12)
    return _more_exact(_joined(_more_exact(cheapest, costs, by_s), costs, by_s), costs, by_s)


def optimal_cuts(ready_s: Sequence[float], cost: npt.NDArray[np.float64]) -> list[Cut]:
    """Runs (first, stop) in order. `cost[i, j]` is for gradients i to j − 1."""
    count = len(ready_s)
    ends = np.zeros(count + 1)
    origin = np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        found = np.maximum(ends[:stop], ready_s[stop - 1]) + cost[:stop, stop]
        origin[stop] = found.argmin()
        ends[stop] = found[origin[stop]]
    cuts = []
    stop = count
    while stop:
        cuts.append((int(origin[stop]), stop))
        stop = int(origin[stop])
    return cuts[::-1]


def _more_exact(buffers: Sequence[Buffer], costs: Costs, by_s: float) -> list[Buffer]:
    """From the last one back, each takes the most exact format that ends by the time at which those
    behind it must begin, if those before it stay as they are; never a less exact one than it has."""
    starts, free = [], 0.0
    for buffer in buffers:
        starts.append(costs.start_s(buffer, free))
        free = starts[-1] + costs.seconds(buffer)
    chosen = []
    for buffer, start in zip(reversed(buffers), reversed(starts), strict=True):
        better = costs.wires[: costs.wires.index(buffer.wire)]
        found = (
            one for wire in better if start + costs.seconds(one := Buffer(buffer.cut, wire)) <= by_s
        )
        chosen.append(next(found, buffer))
        by_s -= costs.seconds(chosen[-1])
    return chosen[::-1]


def _joined(buffers: Sequence[Buffer], costs: Costs, by_s: float) -> list[Buffer]:
    """The same end with fewer messages: neighbours that backward hides either way become one, in the
    more exact of their formats."""
    latest = [by_s]  # when the channel must be free for those behind, the last buffer first
    for buffer in reversed(buffers[1:]):
        latest.append(latest[-1] - costs.seconds(buffer))
    latest.reverse()
    found, free, last = [], 0.0, buffers[0]
    for buffer, due in zip(buffers[1:], latest[1:], strict=True):
        wire = min((last.wire, buffer.wire), key=costs.wires.index)
        both = Buffer((last.cut[0], buffer.cut[1]), wire)
        if costs.start_s(both, free) + costs.seconds(both) <= due:
            last = both
            continue
        free = costs.start_s(last, free) + costs.seconds(last)
        found.append(last)
        last = buffer
    return [*found, last]
