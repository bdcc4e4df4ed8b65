"""The best buffers: dynamic programming, exact for one channel.

In: when each gradient is ready, and the cost of any run of neighbours. Out: the cuts that end the last
exchange soonest. F(j), the earliest end of the first j gradients, is the least over i of
max(F(i), ready(j)) + cost(i, j): the last buffer holds the gradients i to j. An earlier end of what came
before never makes a later one end later, so the best of the parts is the best of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Cut = tuple[int, int]


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
    return _joined(cuts[::-1], ready_s, cost)


def exact_wires(
    cuts: Sequence[Cut], ready_s: Sequence[float], wires: Sequence[str],
    cost: Callable[[str, int, int], float],
) -> list[str]:  # fmt: skip
    """A format for each buffer, so that all end as soon as with the cheapest ones, and no single one
    could take a more exact format.

    `wires` begin with the most exact; `cost` is of a format and a cut. From the last buffer back, each
    takes the most exact one that ends by the time at which those behind it must begin, if those before
    it take their cheapest.
    """
    cheapest = [min(cost(wire, *cut) for wire in wires) for cut in cuts]
    starts, free = [], 0.0
    for (_, stop), seconds in zip(cuts, cheapest, strict=True):
        starts.append(max(free, ready_s[stop - 1]))
        free = starts[-1] + seconds
    due, chosen = free * (1 + 1e-12), []
    for cut, start in zip(reversed(cuts), reversed(starts), strict=True):
        fitting = (wire for wire in wires if start + cost(wire, *cut) <= due)
        # Rounding in the last digit can leave none.
        chosen.append(next(fitting, min(wires, key=lambda wire: cost(wire, *cut))))
        due -= cost(chosen[-1], *cut)
    return chosen[::-1]


def _joined(cuts: list[Cut], ready_s: Sequence[float], cost: npt.NDArray[np.float64]) -> list[Cut]:
    """The same end with fewer messages: neighbours that backward hides either way become one."""
    limit = _end(cuts, ready_s, cost) * (1 + 1e-12)
    place = 0
    while place + 1 < len(cuts):
        one = [*cuts[:place], (cuts[place][0], cuts[place + 1][1]), *cuts[place + 2 :]]
        if _end(one, ready_s, cost) <= limit:
            cuts = one
        else:
            place += 1
    return cuts


def _end(cuts: Sequence[Cut], ready_s: Sequence[float], cost: npt.NDArray[np.float64]) -> float:
    free = 0.0
    for first, stop in cuts:
        free = max(free, ready_s[stop - 1]) + float(cost[first, stop])
    return free
