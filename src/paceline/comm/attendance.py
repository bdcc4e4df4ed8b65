"""`Attendance`: which ranks have reached a point, counted in the rendezvous store.

Each rank adds one bit to a counter that it shares with 59 others, and the rank that completes the last
counter knows that all are there. So a point costs a rank one request, nobody reads rank by rank, and
the counters still name every rank that is missing.
"""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

# A bit for each rank, in the store's signed 64-bit counters.
_BLOCK = 60


class Attendance:
    """One point, under a key that is used for it alone. Every rank calls `arrive` once."""

    def __init__(self, store: Store, key: str, world_size: int) -> None:
        self._store, self._key, self._size = store, key, world_size
        self._blocks = -(-world_size // _BLOCK)

    def arrive(self, rank: int) -> bool:
        """True on the rank that completes the attendance."""
        block, bit = divmod(rank, _BLOCK)
        if self._store.add(self._counter(block), 1 << bit) != self._complete(block):
            return False
        return self._blocks == 1 or self._store.add(f"{self._key}/blocks", 1) == self._blocks

    def missing(self) -> list[int]:
        """Ranks that have not arrived."""
        missing = []
        for block in range(self._blocks):
            absent = self._complete(block) & ~self._store.add(self._counter(block), 0)
            missing += [block * _BLOCK + bit for bit in range(_BLOCK) if absent >> bit & 1]
        return missing

    def _counter(self, block: int) -> str:
        return f"{self._key}/ranks/{block}"

    def _complete(self, block: int) -> int:
        """The counter's value once all of its ranks have arrived."""
        return (1 << min(_BLOCK, self._size - block * _BLOCK)) - 1
