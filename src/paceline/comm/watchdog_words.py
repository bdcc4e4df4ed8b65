"""What a watchdog says: which exchange stalled, and because of whom.

In: the standings of all ranks, those that fell silent, and the buffers of the plan. Out: one line,
`cause; remedy`. Pure: every rank would say the same of the same standings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.comm.progress_board import Standing
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
) -> CommError:
    """`silent`: ranks that have posted nothing for a while; how far they came since, nobody knows. Some
    other rank's standing `waits`."""
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
    culprits = sorted({*absent, *silent})
    named = [_culprit(rank, standings[rank], rank in silent) for rank in culprits]
    left_out = len(named) - _NAMED_RANKS
    if left_out > 0:
        named = [*named[:_NAMED_RANKS], f"{left_out} more ranks likewise"]
    why = "; ".join(named) or "all ranks are in it, and the network does not carry it to its end"
    look = f"rank {culprits[0]}'s log and host" if culprits else "the network between the hosts"
    return CommError(
        f"{what} stalled for {stalled_s:.3g} s: {why}",
        f"look into {look}; comm.timeout_s = {timeout_s:g} sets the wait; go on with --resume auto",
    )


def unreachable_error(
    standing: Standing, rank: int, host: str, silent_s: float, closed: bool
) -> CommError:
    """The store gives no answer; `closed`: its connection was closed, so its process is gone."""
    answer = "has been gone" if closed else "has not answered"
    return CommError(
        f"rank {rank}, {standing.doing}: rank 0's host ({host}) {answer} for {silent_s:.3g} s",
        "it or this host has ended or is cut off the network; go on with --resume auto",
    )


def size(amount: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount} bytes"


def _buffer(index: int, buffers: Sequence[BufferWords]) -> str:
    if index < len(buffers):
        return buffers[index].describe(index + 1, len(buffers))
    return f"buffer {index + 1}"


def _culprit(rank: int, standing: Standing, silent: bool) -> str:
    if silent:
        return f"rank {rank} gives no sign of life (last seen {standing.doing})"
    return f"rank {rank} did not arrive ({standing.doing})"
