"""Segments of a buffer on their way through an algorithm, one behind the other.

In: for each segment a generator that does one round of its algorithm at every `next`. Out: all of them
run to their end, several under way at once, so that one segment's sum is computed while another's
messages travel.

Every rank's generator yields equally often, and a round waits only for what was sent in an earlier
round. All ranks then take the rounds of all segments in one order, and none waits in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

Rounds = Iterator[None]


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """`parts` stretches of nearly equal length, some empty where there is less to cut."""
    return [(length * at // parts, length * (at + 1) // parts) for at in range(parts)]


def run_segments(count: int, depth: int, start: Callable[[int, int], Rounds]) -> None:
    """Runs `start(segment, lane number)` for each segment, at most `depth` at a time.

    Half of them begin in the same pass: then a link has several messages to carry from the first
    round to the last, and the other half keeps it busy while new segments begin.
    """
    together = max(1, depth // 2)
    free = deque(range(depth))
    active: deque[tuple[int, Rounds]] = deque()
    admitted = 0
    while admitted < count or active:
        for _ in range(min(together, count - admitted, len(free))):
            number = free.popleft()
            active.append((number, start(admitted, number)))
            admitted += 1
        for _ in range(len(active)):
            number, rounds = active.popleft()
            try:
                next(rounds)
            except StopIteration:
                free.append(number)
            else:
                active.append((number, rounds))


def in_step(parts: list[Rounds]) -> Rounds:
    """Runs several generators of equal length as one, round by round."""
    live = list(parts)
    while live:
        live = [rounds for rounds in live if next(rounds, StopIteration) is None]
        yield
