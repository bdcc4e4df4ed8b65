"""The training order: `SampleOrder`, an endless stream of concatenated epoch permutations, and
`BatchPlan`, which part of it each step and each rank takes.

The stream depends on the seed only, never on the number of ranks. Any position is computed directly.
Random numbers are counter-based: `hash64` is a function of a seed and counters (epoch, sample index,
draw), the same on every machine and in every thread, so there is no state to save or share.
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

# The constants of splitmix64 (Steele, Lea and Flood 2014): the golden ratio as the step between
# counters, and the multipliers of its finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# Uses that share a seed must not share numbers: each hashes its own constant first.
ORDER_STREAM = 1
AUGMENT_STREAM = 2
SYNTHETIC_STREAM = 3
PACK_STREAM = 4
SHARD_ORDER_STREAM = 5
RUN_ORDER_STREAM = 6
SPLIT_STREAM = 7

# Neighboring samples that stay together, for `data.shuffle = "shards"`.
SHUFFLE_RUN = 16
# Shards that are mixed with one another.
SHUFFLE_WINDOW = 16


def hash64(seed: int, stream: int, *counters: npt.ArrayLike) -> UInt64:
    """Hashes `(seed, stream, counters…)`; counters broadcast against one another.

    For fixed values of all others the map from the last counter is one to one, so hashes of
    different indices never tie.
    """
    state = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    for counter in (stream, *counters):
        # Arrays wrap silently where NumPy's scalars would warn, hence at least one dimension.
        step = np.atleast_1d(np.asarray(counter)).astype(np.uint64) + np.uint64(1)
        state = _mix(state + step * np.uint64(_GOLDEN))
    return state


def uniform(seed: int, epochs: Int64, indices: Int64, draws: int) -> npt.NDArray[np.float64]:
    """`draws` numbers in [0, 1) for each sample, a row a sample: (seed, epoch, index) decides."""
    numbers = hash64(
        seed, AUGMENT_STREAM, epochs[:, None], indices[:, None], np.arange(draws)[None, :]
    )
    return to_unit(numbers)


def to_unit(hashes: UInt64) -> npt.NDArray[np.float64]:
    """The upper 53 bits as a number in [0, 1): every value is exact in float64."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: UInt64) -> UInt64:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class ShardGroups:
    """Shuffle shards, then runs of `run` neighbours among `window` shards at a time."""

    sizes: tuple[int, ...]
    window: int
    run: int


class SampleOrder:
    """Position p holds sample `permutation(p // count)[p % count]`; safe to share among threads."""

    def __init__(self, count: int, seed: int, groups: ShardGroups | None = None) -> None:
        """Without `groups` every order of the samples is as likely as any other."""
        if count < 1:
            raise ValueError(f"an order needs at least one sample, not {count}")
        if groups is not None and sum(groups.sizes) != count:
            raise ValueError(f"groups of {sum(groups.sizes)} samples for {count}")
        self.count = count
        self.seed = seed
        self.groups = groups
        self._lock = threading.Lock()
        self._recent: dict[int, Int64] = {}

    def permutation(self, epoch: int) -> Int64:
        """The samples of `epoch`, each exactly once: sorted by their hash. Do not write to it."""
        with self._lock:
            if epoch not in self._recent:
                # A batch may span an epoch's end, and prefetching runs ahead: two are in use.
                while len(self._recent) > 1:
                    del self._recent[next(iter(self._recent))]
                self._recent[epoch] = self._build(epoch)
            return self._recent[epoch]

    def _build(self, epoch: int) -> Int64:
        indices = np.arange(self.count, dtype=np.int64)
        if self.groups is not None:
            groups = self.groups
            return shard_permutation(self.seed, epoch, groups.sizes, groups.window, groups.run)
        return np.argsort(hash64(self.seed, ORDER_STREAM, epoch, indices), kind="stable")

    def at(self, start: int, stop: int) -> tuple[Int64, Int64]:
        """Epochs and sample indices of the positions `start` to `stop`."""
        if not 0 <= start <= stop:
            raise ValueError(f"no such stretch of the stream: {start} to {stop}")
        positions = np.arange(start, stop, dtype=np.int64)
        epochs = positions // self.count
        pieces = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // self.count, -(-stop // self.count)):
            first = epoch * self.count
            piece = self.permutation(epoch)[max(start - first, 0) : stop - first]
            pieces.append(piece)
        return epochs, np.concatenate(pieces)


def shard_groups(settings: DataSettings, sizes: Sequence[int] | None) -> ShardGroups | None:
    """What `data.shuffle` asks for; `sizes` of the source's shards, None where it has none."""
    if settings.shuffle == "global":
        return None
    if sizes is None:
        raise ConfigError(
            "data.shuffle",
            settings.shuffle,
            "the data is not in shards",
            "set data.shuffle = 'global', or make shards with paceline pack",
        )
    return ShardGroups(tuple(sizes), SHUFFLE_WINDOW, SHUFFLE_RUN)


def shard_permutation(seed: int, epoch: int, sizes: Sequence[int], window: int, run: int) -> Int64:
    """A shuffle that reads mostly sequentially: every sample once, a function of the arguments
    alone.

    Shards come in another order in each epoch. The samples of `window` consecutive shards are
    mixed, in runs of `run` neighbours; where runs are cut differs between epochs and shards, so
    that a sample's neighbours change.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    shards = np.arange(len(counts), dtype=np.int64)
    keys = hash64(seed, SHARD_ORDER_STREAM, epoch, shards)
    place = np.empty_like(shards)
    place[np.argsort(keys, kind="stable")] = shards
    # The first run of a shard is shorter by a number of its own: else runs would never change.
    shift = (keys >> np.uint64(32)).astype(np.int64) % run
    runs_of = np.where(counts > 0, -(-(counts + shift) // run), 0)
    shard = np.repeat(shards, runs_of)
    number = np.arange(len(shard), dtype=np.int64) - np.repeat(
        np.cumsum(runs_of) - runs_of, runs_of
    )
    first = np.maximum(number * run - shift[shard], 0)
    last = np.minimum((number + 1) * run - shift[shard], counts[shard])
    order = np.lexsort(
        (hash64(seed, RUN_ORDER_STREAM, epoch, shard, number), place[shard] // window)
    )
    start = ((np.cumsum(counts) - counts)[shard] + first)[order]
    length = (last - first)[order]
    # Each run counted up from its start: a running sum over all of them.
    before = np.cumsum(length) - length
    samples = np.arange(int(counts.sum()), dtype=np.int64)
    samples += np.repeat(start - before, length)
    return samples


Stretch = tuple[int, int]


@dataclass(frozen=True)
class BatchPlan:
    """Which stretch of the stream each step and each micro-batch takes; pure arithmetic on
    positions.

    Steps count from 0. A global batch may span an epoch's end; only the last may be short. The
    micro-batches of a step do not depend on the number of ranks, only their owners do.

    `growth` lists (epoch, global batch): a step takes the batch of the last epoch that lies at or before
    its first sample, and `global_batch` before the first of them. Stages thus never cut a batch short.
    `shares` are the samples of each rank in a full global batch, where ranks differ in speed; empty, all
    are equal.
    """

    samples: int
    epochs: int
    global_batch: int
    micro_batch: int
    world_size: int
    growth: tuple[tuple[float, int], ...] = ()
    shares: tuple[int, ...] = ()
    # First step, its position and the batch of each stage.
    _stages: tuple[tuple[int, int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shares and (
            len(self.shares) != self.world_size
            or sum(self.shares) != self.global_batch
            or min(self.shares) < 1
        ):
            raise ValueError(
                f"shares = {self.shares}: must be {self.world_size} that add up to "
                f"{self.global_batch}"
            )
        for name in ("samples", "epochs", "global_batch", "micro_batch", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        epochs = [epoch for epoch, _ in self.growth]
        if epochs != sorted(set(epochs)) or any(not 0 < epoch < math.inf for epoch in epochs):
            raise ValueError(f"growth = {self.growth}: epochs must rise, from above 0")
        for batch in (self.global_batch, *(batch for _, batch in self.growth)):
            if batch < 1 or batch % (self.micro_batch * self.world_size):
                raise ValueError(
                    f"global_batch = {batch} is not a multiple of micro_batch · "
                    f"world_size = {self.micro_batch} · {self.world_size}"
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
        """Micro-batches that each rank takes in a full step; of the largest batch where it grows."""
        largest = max(batch for _, _, batch in self._stages)
        return largest // (self.micro_batch * self.world_size)

    @property
    def steps_per_epoch(self) -> float:
        """On average over the run, where the batch grows."""
        if self.growth:
            return self.total_steps / self.epochs
        return self.samples / self.global_batch

    @property
    def last_batch(self) -> int:
        """The global batch at the end of the run."""
        return self.batch_at(self.total_steps - 1)

    def batch_at(self, step: int) -> int:
        """The global batch of `step`, which only the last step may fall short of."""
        return self._stage(step)[2]

    def position(self, step: int) -> int:
        """Samples that full batches before `step` take; past the last step it goes on counting."""
        first, position, batch = self._stage(step)
        return position + (step - first) * batch

    def _stage(self, step: int) -> tuple[int, int, int]:
        # Of two stages that begin with the same step, the later one counts.
        return next(stage for stage in reversed(self._stages) if stage[0] <= max(step, 0))

    def step_range(self, step: int) -> Stretch:
        """Positions of the stream that `step` consumes."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        start = self.position(step)
        return start, min(start + self.batch_at(step), self.total_samples)

    def epoch_at(self, step: int) -> float:
        """Epochs consumed once `step` steps are done."""
        return min(self.position(step), self.total_samples) / self.samples

    def micro_batches(self, step: int, rank: int) -> list[Stretch]:
        """This rank's share of `step`; none in a last step too short for all ranks.

        A short step is cut into as few micro-batches as hold it, of sizes that differ by at most
        one; number j belongs to rank j modulo the ranks.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
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
        """Ranks take neighbouring stretches in proportion to their shares, each in as many micro-batches
        as in a full step, or fewer where it has fewer samples."""
        before = sum(self.shares[:rank])
        first = start + length * before // self.global_batch
        last = start + length * (before + self.shares[rank]) // self.global_batch
        pieces = min(self.accumulation, last - first)
        return [
            (first + j * (last - first) // pieces, first + (j + 1) * (last - first) // pieces)
            for j in range(pieces)
        ]

    def usual_micro_batch(self, rank: int) -> int:
        """Samples of nearly every micro-batch of this rank."""
        return self.shares[rank] // self.accumulation if self.shares else self.micro_batch

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether an epoch is complete after `step` that was not before it, and whose number
        `every` divides; a step may complete several."""
        start, stop = (position // self.samples for position in self.step_range(step))
        return start // every < stop // every
