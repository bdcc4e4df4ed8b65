"""What a watchdog says: which exchange stalled, and because of whom.

In: the standings of all ranks, those that fell silent, and the buffers of the plan. Out: one line,
`cause; remedy`. Pure: every rank would say the same of the same standings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.comm.progress_board import Standing
from paceline.comm.rank_hosts import RankHost, RankHosts, ranks_text
from paceline.core.errors import CommError

if TYPE_CHECKING:
    from paceline.comm.gradient_exchange import GradientExchange

_NAMED_TENSORS = 3
_NAMED_RANKS = 8


@dataclass(frozen=True)
class BufferWords:
    """A buffer of the plan, as a person would look for it."""

    bytes: int
    algorithm: str
    tensors: tuple[str, ...]
    wire: str = "auto"

    @classmethod
    def of(cls, exchange: GradientExchange) -> list[BufferWords]:
        """Those of an exchange, with the bytes that travel."""
        return [
            cls(sum(m.wire_bytes for m in messages), b.algorithm, b.tensors, b.wire)
            for b, messages in zip(exchange.plan.buffers, exchange.messages, strict=True)
        ]

    def label(self, number: int) -> str:
        """`buffer 3, 16.2 MiB, ring`."""
        return f"buffer {number}, {size(self.bytes)}, {self.algorithm}"

    def describe(self, number: int, of: int) -> str:
        first = ", ".join(self.tensors[:_NAMED_TENSORS])
        more = len(self.tensors) - _NAMED_TENSORS
        rest = f" and {more} more" if more > 0 else ""
        return f"buffer {number} of {of} ({size(self.bytes)}, {self.algorithm}: {first}{rest})"


def stall_error(
    standings: Mapping[int, Standing],
    silent: Collection[int],
    buffers: Sequence[BufferWords],
    stalled_s: float,
    timeout_s: float,
    hosts: RankHosts | None = None,
) -> CommError:
    """`silent`: ranks that have posted nothing for a while; how far they came since, nobody knows. Some
    other rank's standing `waits`."""
    hosts = hosts or RankHosts()
    known = {rank: s for rank, s in standings.items() if rank not in silent}
    waiting = {rank: s for rank, s in known.items() if s.waits}
    inside = [s for s in waiting.values() if s.in_exchange]
    if inside:
        # The earliest place at which somebody waits: later ones wait for that one too.
        first = min(inside, key=lambda s: (s.step, s.ended))
        what = f"step {first.step + 1}: the exchange of {_buffer(first.ended, buffers)}"
        place = (first.step, first.ended + 1)
        absent = [rank for rank, s in known.items() if (s.step, s.begun) < place]
    else:
        calls = min(s.calls for s in waiting.values())
        called = next(s.call for s in waiting.values() if s.calls == calls)
        what, absent = called, [rank for rank, s in known.items() if s.calls < calls]
    named = _culprits(standings, absent, silent, hosts)
    left_out = len(named) - _NAMED_RANKS
    if left_out > 0:
        named = [*named[:_NAMED_RANKS], f"{left_out} more ranks likewise"]
    why = "; ".join(named) or "all ranks are in it, and the network does not carry it to its end"
    return CommError(
        f"{what} stalled for {stalled_s:.3g} s: {why}",
        f"look into {_look(absent, silent, hosts)}; comm.timeout_s = {timeout_s:g} sets the wait; go on "
        "with --resume auto",
    )


def unreachable_error(
    standing: Standing,
    rank: int,
    host: str,
    silent_s: float,
    closed: bool,
    hosts: RankHosts | None = None,
    reached: Sequence[RankHost] | None = None,
) -> CommError:
    """The store gives no answer; `closed`: its connection was closed, so its process is gone. `reached`:
    of the hosts other than these two, those that still answer; None where there are none."""
    hosts = hosts or RankHosts()
    answer = "has been gone" if closed else "has not answered"
    there = f"rank 0's host {hosts.of(0) or f'({host})'}"
    cause = f"{hosts.rank_label(rank)}, {standing.doing}: {there} {answer} for {silent_s:.3g} s"
    cut = "it or this host has ended or is cut off the network"
    if reached:
        cause += f", though {', '.join(map(str, reached))} can be reached"
        cut = "that host has ended, or the network between it and this host is cut"
    elif reached is not None and not closed:
        cause += ", nor does any other host answer"
        cut = f"this host {hosts.of(rank)} is cut off the network"
    return CommError(cause, f"{cut}; go on with --resume auto")


def size(amount: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount} bytes"


def _buffer(index: int, buffers: Sequence[BufferWords]) -> str:
    if index < len(buffers):
        return buffers[index].describe(index + 1, len(buffers))
    return f"buffer {index + 1}"


def _culprits(
    standings: Mapping[int, Standing],
    absent: Collection[int],
    silent: Collection[int],
    hosts: RankHosts,
) -> list[str]:
    """First who gives no sign of life, hosts as a whole where none of their ranks does. Ranks that have
    not arrived but still post come last: they may only be slower than the others."""
    gone = hosts.whole_hosts(silent)
    named = [
        f"host {host} with {ranks_text(ranks)} gives no sign of life "
        f"(last seen {standings[ranks[0]].doing})"
        for host, ranks in gone.items()
    ]
    told = {rank for ranks in gone.values() for rank in ranks}
    for rank in sorted(set(silent) - told):
        last = standings[rank].doing
        named.append(f"{hosts.rank_label(rank)} gives no sign of life (last seen {last})")
    for rank in sorted(set(absent) - set(silent)):
        named.append(f"{hosts.rank_label(rank)} did not arrive ({standings[rank].doing})")
    return named


def _look(absent: Collection[int], silent: Collection[int], hosts: RankHosts) -> str:
    culprits = sorted(silent) or sorted(absent)
    if not culprits:
        return "the network between the hosts"
    where = f"rank {culprits[0]}'s log and host"
    # A host of which nothing is heard at all may be well, and its link cut.
    apart = silent and all(hosts.of(rank) not in (None, hosts.of(0)) for rank in silent)
    return f"{where}, and the network to it" if apart else where
