"""The batch of a run: its sizes, and the stages by which it grows."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.optim.batch_growth import Stages
from paceline.optim.schedules import Step
from paceline.optim.settings import OptimSettings

# Without `--batch-size`, the largest micro-batch of a process.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256
# With a batch that nobody has chosen.
_LEAST_STEPS_PER_EPOCH = 8
_LEAST_AUTOMATIC_BATCH = 16
# Evaluation keeps no activations, so its batches may be larger than those of training.
_EVAL_BATCH, _EVAL_TIMES = 256, 4


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch · ranks · accumulation`, always exactly."""

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        chosen = ", chosen automatically" if self.automatic else ""
        return (
            f"{self.global_batch} = {self.micro_batch} a process × {world_size} rank(s) × "
            f"{self.accumulation} micro-step(s){chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int, samples: int | None = None
) -> BatchSizes:
    """Without a global batch it is the micro-batch times the number of ranks; without both it is 256, or
    less, down to 16, where an epoch of `samples` would have fewer than eight steps. Raises ConfigError,
    with the nearest valid values, if the global batch is not divisible."""
    if micro_batch is None and global_batch is None and samples is not None:
        most = max(_LEAST_AUTOMATIC_BATCH, samples // _LEAST_STEPS_PER_EPOCH)
        if most < DEFAULT_GLOBAL_BATCH:
            share = max(1, min(most, samples) // world_size)
            return _automatic((1 << share.bit_length() - 1) * world_size, world_size)
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


def eval_batch(micro_batch: int) -> int:
    """Images of one batch of an evaluation."""
    return min(_EVAL_BATCH, _EVAL_TIMES * micro_batch)


def requested_batch(config: RunConfig, ranks: int) -> tuple[int | None, int | None, int]:
    """What `resolve_batch_sizes` checks before the data is open: `optim.scaling` chooses the micro-batch
    unless the user gave it."""
    chosen = (
        config.optim.scaling == "auto" and "run.batch_size" not in config.optim.known_good.keeps
    )
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    return first, None if chosen else config.run.batch_size, ranks


def batch_stages(settings: OptimSettings, sizes: BatchSizes, world_size: int) -> Stages:
    """The (epoch, global batch) that `optim.batch_schedule` adds to the first batch."""
    unit = sizes.micro_batch * world_size
    epochs = settings.of("step", Step).epochs
    return settings.batch_growth.after(sizes.global_batch, unit, epochs)


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """As few micro-steps as the largest automatic micro-batch allows."""
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
    """The valid micro-batches closest to the wanted one."""
    if global_batch % world_size:
        return f"with a number of ranks that divides {global_batch}"
    share = global_batch // world_size
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))
