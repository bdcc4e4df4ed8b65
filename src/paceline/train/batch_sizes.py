"""Chooses the batch sizes of a run, and the epochs at which a growing batch changes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.units import plural
from paceline.optim.batch_growth import Stages, largest_micro_batch, nearest_multiples
from paceline.optim.schedules import Step
from paceline.optim.settings import OptimSettings
from paceline.train.checkpoint import Checkpoint

# Without `--batch-size`, the largest micro-batch of a process.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256
# Bounds of an automatically chosen batch.
_LEAST_STEPS_PER_EPOCH = 8
_LEAST_AUTOMATIC_BATCH = 16
# Evaluation keeps no activations, so its batches may be larger than those of training.
_EVAL_BATCH, _EVAL_TIMES = 256, 4


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a step. `global_batch` is a multiple of `micro_batch`.

    Attributes:
        global_batch: Number of samples in one update.
        micro_batch: Number of samples in one forward and backward pass on one rank.
        accumulation: Number of micro-batches in one step on the rank with the most.
        automatic: True if Paceline has chosen the micro-batch.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        """Returns the sizes as text for `world_size` ranks."""
        chosen = ", chosen automatically" if self.automatic else ""
        count, ranks = self.global_batch // self.micro_batch, plural(world_size, "rank")
        if count % world_size:
            least = count // world_size
            each = f"{least} or {self.accumulation}" if least else "at most 1"
            return (
                f"{self.global_batch} = {self.micro_batch} × {plural(count, 'micro-batch')} on {ranks}, "
                f"{each} per rank{chosen}"
            )
        return (
            f"{self.global_batch} = {self.micro_batch} per rank × {ranks} × "
            f"{plural(self.accumulation, 'micro-batch')}{chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int, samples: int | None = None
) -> BatchSizes:
    """Chooses the batch sizes that the user has not given.

    Args:
        global_batch: Number of samples in one update. The default is the micro-batch times the number
            of ranks. If both are None, the default is 256. The default is lower (but at least about
            16) if an epoch would have fewer than eight steps.
        micro_batch: Number of samples in one pass on one rank. The default is at most 256.
        world_size: Number of ranks.
        samples: Number of training images, if known.

    Returns:
        The sizes.

    Raises:
        ConfigError: If the global batch is not a multiple of the micro-batch, or if no micro-batch
            would keep all ranks about equally busy. The message names the nearest valid sizes.
    """
    if micro_batch is None and global_batch is None and samples is not None:
        most = max(_LEAST_AUTOMATIC_BATCH, samples // _LEAST_STEPS_PER_EPOCH)
        if most < DEFAULT_GLOBAL_BATCH:
            per_rank = max(1, min(most, samples) // world_size)
            return _automatic((1 << per_rank.bit_length() - 1) * world_size, world_size)
    if micro_batch is None:
        return _automatic(global_batch or DEFAULT_GLOBAL_BATCH, world_size)
    if global_batch is None:
        return BatchSizes(micro_batch * world_size, micro_batch, 1, False)
    if global_batch % micro_batch:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"is not a multiple of the batch size {micro_batch}",
            f"use {nearest_multiples(global_batch, micro_batch)}, or --batch-size "
            + _nearest_divisor(global_batch, micro_batch),
        )
    return _sizes(global_batch, micro_batch, world_size, automatic=False)


def eval_batch(micro_batch: int) -> int:
    """Returns the number of images in an evaluation batch for a given training micro-batch."""
    return min(_EVAL_BATCH, _EVAL_TIMES * micro_batch)


def requested_batch(
    config: RunConfig, ranks: int, resumed: Checkpoint | None = None
) -> tuple[int | None, int | None, int]:
    """Returns global batch, micro-batch and number of ranks, as arguments of `resolve_batch_sizes`.

    The micro-batch is None if the scaling rule chooses it. A resumed run keeps the sizes with which it
    started, unless the settings contain others, so that they do not depend on the number of ranks.
    """
    optim, micro = config.optim, config.run.batch_size
    first = optim.batch_growth.first_batch(config.run.global_batch_size)
    scaled = optim.follows_rule and first is not None and optim.known_batch not in (None, first)
    if scaled and "run.batch_size" not in optim.known_good.keeps:
        micro = None
    elif resumed is not None and micro is None:
        micro = resumed.sampler.get("micro_batch")
    if resumed is not None and first is None:
        start = resumed.sampler["global_batch"]
        first = int(resumed.sampler.get("last_batch", start) if optim.follows_rule else start)
    return first, micro, ranks


def batch_stages(settings: OptimSettings, sizes: BatchSizes) -> Stages:
    """Returns the later batch sizes of a growing batch, as pairs (first epoch, global batch).

    The setting is `optim.batch_schedule`.
    """
    epochs = settings.of("step", Step).epochs
    return settings.batch_growth.after(sizes.global_batch, sizes.micro_batch, epochs)


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """Chooses the micro-batch for a global batch: as large as one pass allows."""
    micro_batch = largest_micro_batch(global_batch, world_size, LARGEST_AUTOMATIC_MICRO_BATCH)
    part = -(-global_batch // world_size)
    if global_batch % world_size and 4 * micro_batch < min(part, LARGEST_AUTOMATIC_MICRO_BATCH):
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"cannot be divided well among {world_size} ranks",
            f"use {nearest_multiples(global_batch, world_size)}, or give --batch-size",
        )
    return _sizes(global_batch, micro_batch, world_size, automatic=True)


def _sizes(global_batch: int, micro_batch: int, world_size: int, *, automatic: bool) -> BatchSizes:
    accumulation = -(-global_batch // (micro_batch * world_size))
    return BatchSizes(global_batch, micro_batch, accumulation, automatic)


def _nearest_divisor(global_batch: int, wanted: int) -> str:
    """Returns the possible micro-batches closest to `wanted`, as a text."""
    divisors = [d for d in range(1, global_batch + 1) if global_batch % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))
