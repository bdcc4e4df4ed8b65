"""Batch sizes: the global batch, the micro-batch of one process, and the accumulation between them.

In: what recipe and flags say, and the number of ranks. Out: three whole numbers with
global = micro · ranks · accumulation, or an error that names the nearest values that would do.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError

# Without `-b` a process takes its share of the global batch in pieces of at most this many samples.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch · ranks · accumulation`, always exactly."""

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        """For the record: how the global batch is made up, and whether we chose it so."""
        chosen = ", chosen automatically" if self.automatic else ""
        return (
            f"{self.global_batch} = {self.micro_batch} a process × {world_size} rank(s) × "
            f"{self.accumulation} micro-step(s){chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int
) -> BatchSizes:
    """With a micro-batch alone the global batch is micro · ranks; a global batch stays as it is."""
    if micro_batch is None:
        return _automatic(global_batch or DEFAULT_GLOBAL_BATCH, world_size)
    if global_batch is None:
        return BatchSizes(micro_batch * world_size, micro_batch, 1, False)
    unit = micro_batch * world_size
    if global_batch % unit:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"is not a multiple of {unit} = {micro_batch} (batch size) × {world_size} (ranks)",
            f"use {_multiples(global_batch, unit)}, or --batch-size "
            + _nearest_divisor(global_batch, world_size, micro_batch),
        )
    return BatchSizes(global_batch, micro_batch, global_batch // unit, False)


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """The fewest micro-steps whose micro-batch is not too large."""
    if global_batch % world_size:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"cannot be divided among {world_size} ranks",
            f"use {_multiples(global_batch, world_size)}",
        )
    share = global_batch // world_size
    accumulation = -(-share // LARGEST_AUTOMATIC_MICRO_BATCH)
    while share % accumulation:
        accumulation += 1
    return BatchSizes(global_batch, share // accumulation, accumulation, True)


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def _nearest_divisor(global_batch: int, world_size: int, wanted: int) -> str:
    """Micro-batches next to the wanted one with which this global batch would do."""
    if global_batch % world_size:
        return f"with a number of ranks that divides {global_batch}"
    share = global_batch // world_size
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))
