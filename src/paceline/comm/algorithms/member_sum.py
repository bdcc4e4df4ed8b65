"""The sum over some members, by the way that suits their number and the size of the segment.

In: a segment on every member; the kind, or None for the choice by size. Out: the rounds of that kind.

- `flood`: one round, everything to everybody: few members, small segments.
- `exchange`: two rounds of direct messages, reduce-scatter and all-gather: few members.
- `halving_doubling`: 2·log2(n) rounds: many members, small segments.
- `ring`: 2(n−1) rounds between neighbours, each link with one sender: large segments.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.algorithms.flood import Flood
from paceline.comm.algorithms.halving_rounds import HalvingRounds
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.owners import Owners
from paceline.comm.algorithms.ring_rounds import RingRounds
from paceline.comm.algorithms.segments import Rounds
from paceline.core.errors import ConfigError, nearest

KINDS = ("flood", "exchange", "halving_doubling", "ring")

# Measured over Gloo, four masters behind links of 200 Mbit/s. A flood is one round but sends all to
# all; many senders to one link get in each other's way, so beyond small messages a ring is better.
FEW_MEMBERS = 8
FLOOD_BYTES = 24 * 1024
EXCHANGE_BYTES = 64 * 1024
HALVING_BYTES = 1024 * 1024


def choose_kind(members: int, segment_bytes: int) -> str:
    """The same on every rank: it depends on nothing else."""
    if members > FEW_MEMBERS:
        return "halving_doubling" if segment_bytes <= HALVING_BYTES else "ring"
    if segment_bytes * (members - 1) <= FLOOD_BYTES:
        return "flood"
    return "exchange" if segment_bytes <= EXCHANGE_BYTES else "ring"


def check_kind(argument: str, kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise ConfigError(argument, kind, "unknown", nearest(kind, KINDS))


def count_rounds(kind: str, members: int) -> int:
    """For those who look on: they must keep step with the members."""
    if members == 1:
        return 0
    if kind == "ring":
        return 2 * members - 1
    if kind == "halving_doubling":
        levels = members.bit_length() - 1
        return 2 * levels + (2 if members > 1 << levels else 0)
    return 2 if kind == "flood" else 4


def member_rounds(
    kind: str, lane: Lane, segment: Tensor, members: Sequence[int], rank: int
) -> Rounds:
    """Posts what will be received, and returns the rounds."""
    if len(members) == 1:
        return iter(())
    if kind == "flood":
        return Flood(lane, segment, members, rank).rounds()
    if kind == "ring":
        return RingRounds(lane, segment, members, rank).rounds()
    if kind == "halving_doubling":
        return HalvingRounds(lane, segment, members, rank).rounds()
    return _exchange(Owners(lane, segment, members, members, rank))


def _exchange(owners: Owners) -> Rounds:
    yield from owners.reduce()
    yield from owners.gather()
