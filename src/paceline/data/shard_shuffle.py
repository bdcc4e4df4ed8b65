"""A shuffle that reads mostly sequentially, and how good a shuffle is.

In: the sizes of the shards, seed and epoch. Out: a permutation. Shards come in another order in each
epoch; of `window` consecutive ones all samples are mixed, in runs of `run` neighbours. Where runs are
cut differs between epochs and shards, so that a sample's run is not always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.data.randomness import RUN_ORDER_STREAM, SHARD_ORDER_STREAM, Int64, hash64


def shard_permutation(seed: int, epoch: int, sizes: Sequence[int], window: int, run: int) -> Int64:
    """Every sample once; a function of the arguments alone."""
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


@dataclass(frozen=True)
class ShuffleQuality:
    """What a permutation means for the disk and for the batches.

    `sequential_share`: reads of the sample right behind the one read before, in the same shard.
    `near_share`: those at most `near` samples ahead of or behind it, in the same shard.
    `displacement`: mean distance between a sample's place in storage and in the stream, as a share of
    all samples; a third where all orders are equally likely. `label_entropy`: mean entropy in bits of
    the labels of a batch. `label_repeats`: share of samples that have the label of the one before.
    `shards_touched`: mean number of shards that a batch takes samples from.
    """

    sequential_share: float
    near_share: float
    displacement: float
    label_entropy: float
    label_repeats: float
    shards_touched: float


def shuffle_quality(
    permutation: Int64, sizes: Sequence[int], labels: Int64, batch: int, near: int = 64
) -> ShuffleQuality:
    """Of one epoch's order; the last, short batch is left out unless it is the only one."""
    count = len(permutation)
    shard = np.repeat(np.arange(len(sizes)), sizes)[permutation]
    step = np.diff(permutation)
    same = shard[1:] == shard[:-1]
    seen = labels[permutation]
    starts = range(0, max(1, count - batch + 1), batch)
    return ShuffleQuality(
        sequential_share=float(np.mean(same & (step == 1))),
        near_share=float(np.mean(same & (np.abs(step) <= near))),
        displacement=float(np.mean(np.abs(permutation - np.arange(count)))) / count,
        label_entropy=float(np.mean([_entropy(seen[s : s + batch]) for s in starts])),
        label_repeats=float(np.mean(seen[1:] == seen[:-1])),
        shards_touched=float(np.mean([len(np.unique(shard[s : s + batch])) for s in starts])),
    )


def companions_kept(first: Int64, second: Int64, batch: int) -> float:
    """Of all pairs that follow one another in one epoch, the share that meets in a batch of another.

    A global shuffle keeps hardly any (batch / samples); runs keep most of theirs: that is their price.
    """
    place = np.empty_like(second)
    place[second] = np.arange(len(second))
    batches = place[first] // batch
    return float(np.mean(batches[1:] == batches[:-1]))


def _entropy(labels: Int64) -> float:
    share = np.bincount(labels) / len(labels)
    share = share[share > 0]
    return float(-np.sum(share * np.log2(share)))
