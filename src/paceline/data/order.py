"""The order in which training reads samples, and the samples of each step and rank.

`SampleOrder` concatenates one permutation per epoch without end. The order depends on the data and
the seed, never on the number of ranks. `BatchPlan` computes which positions of the order a step and
a rank take. Random numbers are hashes of a seed and counters (epoch, sample index, draw). They are
equal on every machine and in every thread, so no generator state must be saved.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.data.settings import DataSettings

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

# Constants of splitmix64 (Steele, Lea and Flood 2014): the step between counters, and the multipliers
# of its finalizer.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# Each use of a seed hashes its own constant first, so that no two uses get the same random numbers.
ORDER_STREAM = 1
AUGMENT_STREAM = 2
SYNTHETIC_STREAM = 3
PACK_STREAM = 4
SHARD_ORDER_STREAM = 5
RUN_ORDER_STREAM = 6
SPLIT_STREAM = 7

# Number of neighboring samples that stay together with `data.shuffle = "shards"`.
SHUFFLE_RUN = 16


def hash64(seed: int, stream: int, *counters: npt.ArrayLike) -> UInt64:
    """Hashes a seed, a stream and counters to 64-bit integers.

    If only the last counter differs, the hashes differ.

    Args:
        seed: The seed of the run.
        stream: One of the constants `…_STREAM`, which identifies the use of the hashes.
        counters: Integers or arrays of integers. Arrays are broadcast against each other.
    """
    state = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    for counter in (stream, *counters):
        # NumPy warns about overflow of scalars, but not of arrays.
        step = np.atleast_1d(np.asarray(counter)).astype(np.uint64) + np.uint64(1)
        state = _mix(state + step * np.uint64(_GOLDEN))
    return state


def uniform(seed: int, epochs: Int64, indices: Int64, draws: int) -> npt.NDArray[np.float64]:
    """Returns random numbers in [0, 1) for augmentation, as samples × `draws`.

    Sample j has the index `indices[j]` and is read in epoch `epochs[j]`.
    """
    numbers = hash64(
        seed, AUGMENT_STREAM, epochs[:, None], indices[:, None], np.arange(draws)[None, :]
    )
    return to_unit(numbers)


def to_unit(hashes: UInt64) -> npt.NDArray[np.float64]:
    """Converts hashes to float64 in [0, 1). The upper 53 bits are represented exactly."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: UInt64) -> UInt64:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class ShardGroups:
    """Shards and their mixing, for a sample order with `data.shuffle = "shards"`.

    Attributes:
        sizes: Number of samples of each shard.
        window: Number of consecutive shards whose samples are mixed with one another.
        run: Number of consecutive samples of a shard that stay together.
    """

    sizes: tuple[int, ...]
    window: int
    run: int


class SampleOrder:
    """An endless order of samples, with a new permutation for each epoch. Thread-safe.

    The sample at position p is `permutation(p // count)[p % count]`.
    """

    def __init__(self, count: int, seed: int, groups: ShardGroups | None = None) -> None:
        """Creates an order of `count` samples: uniformly random, or by shards if `groups` is given."""
        if count < 1:
            raise ValueError(f"count = {count}: must be at least 1")
        self.count = count
        self.seed = seed
        self.groups = groups
        self._lock = threading.Lock()
        self._recent: dict[int, Int64] = {}

    def permutation(self, epoch: int) -> Int64:
        """Returns the sample indices of `epoch` in order. Callers must not modify the array."""
        with self._lock:
            if epoch not in self._recent:
                # A batch may span two epochs, and prefetching runs ahead, so two are in use.
                while len(self._recent) > 1:
                    del self._recent[next(iter(self._recent))]
                self._recent[epoch] = self._build(epoch)
            return self._recent[epoch]

    def _build(self, epoch: int) -> Int64:
        if self.groups is not None:
            return shard_permutation(self.seed, epoch, self.groups)
        indices = np.arange(self.count, dtype=np.int64)
        return np.argsort(hash64(self.seed, ORDER_STREAM, epoch, indices), kind="stable")

    def at(self, start: int, stop: int) -> tuple[Int64, Int64]:
        """Returns epoch and sample index for each position in `range(start, stop)`."""
        epochs = np.arange(start, stop, dtype=np.int64) // self.count
        pieces = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // self.count, -(-stop // self.count)):
            first = epoch * self.count
            pieces.append(self.permutation(epoch)[max(start - first, 0) : stop - first])
        return epochs, np.concatenate(pieces)


def shard_groups(settings: DataSettings, sizes: Sequence[int] | None) -> ShardGroups | None:
    """Returns the shards to shuffle for `data.shuffle`, or None for a global shuffle.

    Args:
        settings: Settings of the input pipeline.
        sizes: Number of samples of each shard. None if the data is not in shards.

    Raises:
        ConfigError: If `data.shuffle` needs shards and the data has none.
    """
    if not settings.shuffle_window:
        return None
    if sizes is None:
        raise ConfigError(
            "data.shuffle", settings.shuffle, "the data is not in shards",
            "set data.shuffle = 'global', or make shards with paceline pack",
        )  # fmt: skip
    return ShardGroups(tuple(sizes), settings.shuffle_window, SHUFFLE_RUN)


def shard_permutation(seed: int, epoch: int, groups: ShardGroups) -> Int64:
    """Returns a shuffled order of all samples with which most reads are sequential.

    Shuffles the shards in each epoch. Then mixes the samples of `groups.window` consecutive shards,
    but keeps `groups.run` consecutive samples together. These runs begin at different samples in
    each epoch.
    """
    run = groups.run
    counts = np.asarray(groups.sizes, dtype=np.int64)
    shards = np.arange(len(counts), dtype=np.int64)
    keys = hash64(seed, SHARD_ORDER_STREAM, epoch, shards)
    place = np.empty_like(shards)
    place[np.argsort(keys, kind="stable")] = shards
    # The first run of a shard is shorter by a random number, which moves the boundaries of all runs.
    shift = (keys >> np.uint64(32)).astype(np.int64) % run
    runs_of = np.where(counts > 0, -(-(counts + shift) // run), 0)
    shard = np.repeat(shards, runs_of)
    number = np.arange(len(shard), dtype=np.int64) - np.repeat(
        np.cumsum(runs_of) - runs_of, runs_of
    )
    first = np.maximum(number * run - shift[shard], 0)
    last = np.minimum((number + 1) * run - shift[shard], counts[shard])
    order = np.lexsort(
        (hash64(seed, RUN_ORDER_STREAM, epoch, shard, number), place[shard] // groups.window)
    )
    start = ((np.cumsum(counts) - counts)[shard] + first)[order]
    length = (last - first)[order]
    # Position in the order plus an offset per run gives consecutive samples within each run.
    before = np.cumsum(length) - length
    samples = np.arange(int(counts.sum()), dtype=np.int64)
    samples += np.repeat(start - before, length)
    return samples


Stretch = tuple[int, int]


@dataclass(frozen=True)
class BatchPlan:
    """Computes which positions of the sample order each step and each micro-batch takes.

    The first step is 0. A global batch may span two epochs. Only the last global batch may be
    short. The micro-batches of a step do not depend on the number of ranks (except with `shares`),
    but their assignment to ranks does. Ranks may have different numbers of micro-batches.

    Attributes:
        samples: Number of training samples.
        epochs: Number of epochs.
        global_batch: Samples per step, over all ranks.
        micro_batch: Samples per micro-batch.
        world_size: Number of ranks.
        growth: Pairs (epoch, global batch) that change the global batch from that epoch on. Before
            the first pair, `global_batch` applies.
        shares: Samples of each rank in a full global batch, if ranks differ in speed. Empty if all
            ranks take the same number.
    """

    samples: int
    epochs: int
    global_batch: int
    micro_batch: int
    world_size: int
    growth: tuple[tuple[float, int], ...] = ()
    shares: tuple[int, ...] = ()
    # First step, first position and global batch of each stage.
    _stages: tuple[tuple[int, int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for batch in (self.global_batch, *(batch for _, batch in self.growth)):
            if batch < 1 or batch % self.micro_batch:
                raise ValueError(
                    f"global_batch = {batch} is not a multiple of micro_batch = {self.micro_batch}"
                )
        object.__setattr__(self, "_stages", tuple(self._find_stages()))

    def _find_stages(self) -> Iterator[tuple[int, int, int]]:
        step, position, batch = 0, 0, self.global_batch
        yield step, position, batch
        for epoch, grown in self.growth:
            missing = math.ceil(epoch * self.samples) - position
            steps = max(-(-missing // batch), 0)
            step, position, batch = step + steps, position + steps * batch, grown
            yield step, position, batch

    @property
    def total_samples(self) -> int:
        return self.samples * self.epochs

    @cached_property
    def total_steps(self) -> int:
        step, position, batch = next(
            stage for stage in reversed(self._stages) if stage[1] < self.total_samples
        )
        return step - (position - self.total_samples) // batch

    @property
    def accumulation(self) -> int:
        """Most micro-batches of a rank in a full step, at the largest global batch of the run."""
        largest = max(batch for _, _, batch in self._stages)
        return -(-largest // (self.micro_batch * self.world_size))

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch, averaged over the run if the batch grows."""
        if self.growth:
            return self.total_steps / self.epochs
        return self.samples / self.global_batch

    @property
    def last_batch(self) -> int:
        """The global batch size at the end of the run."""
        return self.batch_at(self.total_steps - 1)

    def batch_at(self, step: int) -> int:
        """Returns the global batch of `step`. Only the last step may take fewer samples."""
        return self._stage(step)[2]

    def position(self, step: int) -> int:
        """Returns the position of the first sample of `step`, also for steps beyond the last one."""
        first, position, batch = self._stage(step)
        return position + (step - first) * batch

    def _stage(self, step: int) -> tuple[int, int, int]:
        # If two stages begin with the same step, the later one applies.
        return next(stage for stage in reversed(self._stages) if stage[0] <= max(step, 0))

    def step_range(self, step: int) -> Stretch:
        """Returns the range of positions in the sample order that `step` takes."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is out of range: there are {self.total_steps} steps")
        start = self.position(step)
        return start, min(start + self.batch_at(step), self.total_samples)

    def epoch_at(self, step: int) -> float:
        """Returns how many epochs, as a fraction, are complete after `step` steps."""
        return min(self.position(step), self.total_samples) / self.samples

    def micro_batches(self, step: int, rank: int) -> list[Stretch]:
        """Returns the range of the sample order for each micro-batch of `rank` in `step`.

        A short step has as few micro-batches as possible, whose sizes differ by at most one.
        Micro-batch j belongs to rank j modulo `world_size`, so ranks may have different numbers of
        micro-batches, or none.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is out of range: there are {self.world_size} ranks")
        start, stop = self.step_range(step)
        length = stop - start
        if self.shares:
            return self._by_shares(start, length, rank)
        pieces = -(-length // self.micro_batch)
        return [
            (start + j * length // pieces, start + (j + 1) * length // pieces)
            for j in range(rank, pieces, self.world_size)
        ]

    def _by_shares(self, start: int, length: int, rank: int) -> list[Stretch]:
        """Returns the positions of the rank's micro-batches if `shares` differ between ranks.

        Each rank has as many micro-batches as in a full step, or fewer if it has fewer samples.
        """
        before = sum(self.shares[:rank])
        first = start + length * before // self.global_batch
        last = start + length * (before + self.shares[rank]) // self.global_batch
        pieces = min(self.accumulation, last - first)
        return [
            (first + j * (last - first) // pieces, first + (j + 1) * (last - first) // pieces)
            for j in range(pieces)
        ]

    def full_micro_batch(self, rank: int) -> int:
        """Returns the size of a micro-batch of this rank in a full step."""
        return self.shares[rank] // self.accumulation if self.shares else self.micro_batch

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Returns True if `step` completes an epoch whose number is a multiple of `every`."""
        start, stop = (position // self.samples for position in self.step_range(step))
        return start // every < stop // every
