"""Rounds of messages: what one rank sends and waits for in each part of an all-reduce.

In: members, this rank, a number of elements. Out: generators that write messages into a `Script`, one
round at every `next`, as those of the communication module do it with real ones: a test holds the two
against each other. A wait is for the next message of its sender on the same lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Rounds = Iterator[None]
Lane = tuple[int, int]


class Message(NamedTuple):
    """To `peer` where `sent`, else from it. Messages of one lane between two ranks stay in order."""

    sent: bool
    peer: int
    elements: int
    lane: Lane


class Script:
    """What one rank does, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, peer: int, elements: int, lane: Lane) -> None:
        if elements:
            self.messages.append(Message(True, peer, elements, lane))

    def take(self, peer: int, elements: int, lane: Lane) -> None:
        if elements:
            self.messages.append(Message(False, peer, elements, lane))


def parts(length: int, count: int) -> list[int]:
    """Lengths of `count` stretches that are nearly equal."""
    ends = [length * at // count for at in range(count + 1)]
    return [high - low for low, high in itertools.pairwise(ends)]


def ring(script: Script, lane: Lane, length: int, members: Sequence[int], rank: int) -> Rounds:
    size, at = len(members), members.index(rank)
    after, before = members[(at + 1) % size], members[at - 1]
    chunks = parts(length, size)
    script.send(after, chunks[at], lane)
    yield
    for step in range(size - 1):
        chunk = chunks[(at - step - 1) % size]
        script.take(before, chunk, lane)
        script.send(after, chunk, lane)
        yield
    for step in range(size - 1):
        chunk = chunks[(at - step) % size]
        script.take(before, chunk, lane)
        if step < size - 2:
            script.send(after, chunk, lane)
        yield


def flood(script: Script, lane: Lane, length: int, members: Sequence[int], rank: int) -> Rounds:
    at = members.index(rank)
    others = [member for member in members if member != rank]
    for other in (*others[at:], *others[:at]):
        script.send(other, length, lane)
    yield
    for other in others:
        script.take(other, length, lane)
    yield


def to_owners(
    script: Script, lane: Lane, chunks: Sequence[int], members: Sequence[int],
    owners: Sequence[int], rank: int,
) -> Rounds:  # fmt: skip
    """Every chunk to its owner, who adds up."""
    others = _others(members, rank)
    for other in others:
        for chunk, owner in zip(chunks, owners, strict=True):
            if owner == other:
                script.send(other, chunk, lane)
    yield
    for chunk, owner in zip(chunks, owners, strict=True):
        if owner == rank:
            for other in reversed(others):
                script.take(other, chunk, lane)
    yield


def from_owners(
    script: Script, lane: Lane, chunks: Sequence[int], members: Sequence[int],
    owners: Sequence[int], rank: int,
) -> Rounds:  # fmt: skip
    """Every chunk from its owner to all."""
    owned = [chunk for chunk, owner in zip(chunks, owners, strict=True) if owner == rank]
    for other in _others(members, rank):
        for chunk in owned:
            script.send(other, chunk, lane)
    yield
    for chunk, owner in zip(chunks, owners, strict=True):
        if owner != rank:
            script.take(owner, chunk, lane)
    yield


def _others(members: Sequence[int], rank: int) -> list[int]:
    at = members.index(rank)
    return [*members[at + 1 :], *members[:at]]


def halving(script: Script, lane: Lane, length: int, members: Sequence[int], rank: int) -> Rounds:
    """Members beyond a power of two fold into a neighbour first, and are told last."""
    core = 1 << (len(members).bit_length() - 1)
    extra, levels, at = len(members) - core, core.bit_length() - 1, members.index(rank)
    partner = members[at ^ 1] if at < 2 * extra else None
    if partner is not None and at % 2 == 0:
        script.send(partner, length, lane)
        for _ in range(2 * levels + 2):
            yield
        script.take(partner, length, lane)
        return
    if extra:
        yield
    if partner is not None:
        script.take(partner, length, lane)
    place = at // 2 if at < 2 * extra else at - extra
    steps, low, high = [], 0, length
    for level in range(levels):
        peer, middle = place ^ (1 << level), (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        (low, high), given = (upper, lower) if place >> level & 1 else (lower, upper)
        to = members[peer * 2 + 1 if peer < extra else peer + extra]
        steps.append((to, high - low, given[1] - given[0]))
    for to, kept, given_away in steps:
        script.send(to, given_away, lane)
        yield
        script.take(to, kept, lane)
    for to, kept, given_away in reversed(steps):
        script.send(to, kept, lane)
        yield
        script.take(to, given_away, lane)
    if extra:
        if partner is not None:
            script.send(partner, length, lane)
        yield
