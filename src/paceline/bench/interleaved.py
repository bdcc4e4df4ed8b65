"""Samples of several ways to do one thing, taken in turn.

In: the ways by name. Out: for each the times of the slowest rank, sample by sample. Each round takes one
sample of every way, beginning with another one each time, so that whatever else the machine does hits
all of them alike; ratios within one run then mean something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.bench.rank_group import RankGroup

# With fewer rounds than these a median says nothing, whatever the time limit.
_LEAST_ROUNDS = 3


def interleaved(
    ranks: RankGroup,
    ways: Mapping[str, Callable[[], object]],
    *,
    iterations: int,
    warm_up: int,
    prepare: Callable[[], object] = lambda: None,
    check: Callable[[str], object] = lambda name: None,
    limit_s: float | None = None,
) -> dict[str, list[float]]:
    """`prepare` comes before each sample and `check` after it, outside of its time. Rounds stop
    early where they have taken `limit_s` seconds."""
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for number in range(warm_up + iterations):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            prepare()
            seconds = ranks.timed(ways[name])
            check(name)
            if number >= warm_up:
                taken[name].append(seconds)
        if limit_s is not None and number - warm_up >= _LEAST_ROUNDS - 1:
            # All must stop in the same round, so all go by one clock.
            late = ranks.rank == 0 and time.perf_counter() - begun > limit_s
            if ranks.agree_max(float(late)) > 0:
                break
    return {name: ranks.slowest(seconds) for name, seconds in taken.items()}
