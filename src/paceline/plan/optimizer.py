"""Finds the plan with the shortest predicted step: buckets, algorithms and number formats.

Uses dynamic programming, which is exact if one bucket is all-reduced at a time. F(j), the earliest end
of the all-reduces of the first j gradients, is the minimum over i < j of max(F(i), ready(j)) + cost(i,
j). Here the last bucket contains the gradients i + 1 to j. If the earlier buckets end sooner, the last
bucket does not end later, so an optimal plan consists of optimal partial plans. The cost of a bucket is
the sum of the costs of its messages. Each message uses the cheapest algorithm and the cheapest allowed
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.plan.cluster import RANK_SPREAD, Cluster, slowest_of
from paceline.plan.cost import all_reduce_s, is_priced
from paceline.plan.fusion_plan import FusionBucket, FusionPlan, padded, signal_bytes
from paceline.plan.schedules import algorithm_names
from paceline.plan.wires import keeps_float32, travelling, wide_is_bulk, wire_format, wire_names

# If hidden exchanges slow down compute, plans with 1 to `_MOST_FEWER` buckets are compared, too.
_MOST_FEWER = 8


@dataclass(frozen=True)
class Gradient:
    """The gradient of one tensor, with its size and when it is ready for the all-reduce.

    Attributes:
        name: The name of the tensor.
        elements: Number of elements.
        half: True if the gradient is stored in 16 bits and, by default, also sent in 16 bits.
        ready: The fraction of the backward pass after which the gradient is ready, 0 to 1.
    """

    name: str
    elements: int
    half: bool
    ready: float


class BackwardPass(Protocol):
    """The gradients of a backward pass and the times at which they are ready.

    `paceline.planner.workload.Workload` implements this protocol.
    """

    @property
    def gradients(self) -> Sequence[Gradient]: ...

    def backward_s(self, batch: int) -> float: ...

    def ready_s(self, batch: int) -> list[float]:
        """Returns the seconds from the start of the backward pass until each gradient is ready."""
        ...


def best_plan(
    workload: BackwardPass, cluster: Cluster, batch: int, algorithms: Sequence[str] | None = None,
    wires: Sequence[str] = ("auto",), spread: float = RANK_SPREAD,
) -> FusionPlan:  # fmt: skip
    """Finds the buckets, algorithms and number formats with the shortest predicted step.

    A bucket is sent in a less exact format only if the communication then ends sooner. If
    communication slows down concurrent compute, plans with fewer buckets are compared, too.

    Args:
        workload: Gradient sizes and ready times of one training step.
        cluster: The cluster on which the plan will run.
        batch: The batch size of one rank.
        algorithms: Algorithms that the plan may use. None means all.
        wires: Number formats in which gradients may be sent.
        spread: The relative standard deviation of the ranks' step times.

    Returns:
        The plan with the shortest predicted step.

    Raises:
        ConfigError: If no algorithm or an unknown format is given.
    """
    names = algorithm_names() if algorithms is None else algorithms
    cost = BucketCost(workload.gradients, cluster, names, wires)
    ready = _slowest_ready(workload, cluster, batch, spread)
    costs = Costs(ready, cost.wires, cost.of)
    chosen = optimal_buckets(costs, cost.seconds)
    if cluster.hidden_cost:
        backward = workload.backward_s(batch) * slowest_of(cluster.ranks, spread)
        plans = [chosen, *_fewer_buckets(costs, cost.seconds, len(chosen))]
        chosen = min(plans, key=lambda plan: costs.lost_s(plan, backward, cluster.hidden_cost))
    return _with_names(workload, cost, chosen)


def threshold_plan(
    workload: BackwardPass, cluster: Cluster, threshold: int,
    algorithms: Sequence[str] = ("native",),
) -> FusionPlan:  # fmt: skip
    """Returns the plan in which every bucket is full once it has `threshold` bytes, as in DDP.

    Args:
        workload: Gradient sizes of one training step.
        cluster: The cluster on which the plan will run.
        threshold: Bytes from which on a bucket is full; 0 puts each gradient in its own bucket.
        algorithms: Algorithms that the plan may use. Each message uses the cheapest one.
    """
    cost = BucketCost(workload.gradients, cluster, algorithms)
    buckets, first = [], 0
    for stop in range(1, len(workload.gradients) + 1):
        if cost.bytes(first, stop) >= threshold or stop == len(workload.gradients):
            buckets.append(Bucket((first, stop), cost.wires[0]))
            first = stop
    return _with_names(workload, cost, buckets)


def _slowest_ready(
    workload: BackwardPass, cluster: Cluster, batch: int, spread: float
) -> list[float]:
    """Returns when each gradient is ready on the slowest rank, which delays every all-reduce.

    The times are in seconds from the start of the backward pass.
    """
    slow = slowest_of(cluster.ranks, spread)
    return [ready * slow for ready in workload.ready_s(batch)]


def _with_names(workload: BackwardPass, cost: BucketCost, chosen: Sequence[Bucket]) -> FusionPlan:
    buckets = []
    for (first, stop), wire in chosen:
        names = tuple(gradient.name for gradient in workload.gradients[first:stop])
        algorithm, beside = cost.names(wire, first, stop)
        buckets.append(FusionBucket(names, algorithm, wire, "" if beside == algorithm else beside))
    return FusionPlan(tuple(buckets))


Cut = tuple[int, int]


class Bucket(NamedTuple):
    cut: Cut
    wire: str


class Costs(NamedTuple):
    """When gradients are ready, and a function that predicts the seconds of a bucket.

    `wires` lists the formats, the most exact one first. `of(wire, first, stop)` returns the seconds
    of the bucket with the gradients `first` to `stop` − 1 in the format `wire`.
    """

    ready_s: Sequence[float]
    wires: Sequence[str]
    of: Callable[[str, int, int], float]

    def cheapest(self, cut: Cut) -> Bucket:
        return Bucket(cut, min(self.wires, key=lambda wire: self.of(wire, *cut)))

    def seconds(self, bucket: Bucket) -> float:
        return self.of(bucket.wire, *bucket.cut)

    def start_s(self, bucket: Bucket, free_s: float) -> float:
        """Returns when the all-reduce of a bucket can start, in seconds from the start of backward.

        Args:
            bucket: The bucket.
            free_s: The end of the all-reduce of the previous bucket.
        """
        return max(free_s, self.ready_s[bucket.cut[1] - 1])

    def end_s(self, buckets: Sequence[Bucket]) -> float:
        free = 0.0
        for bucket in buckets:
            free = self.start_s(bucket, free) + self.seconds(bucket)
        return free

    def lost_s(self, buckets: Sequence[Bucket], backward_s: float, hidden_cost: float) -> float:
        """Returns the seconds that communication adds to a step.

        These are the time after the end of backward, and `hidden_cost` times the time during
        backward.
        """
        exposed = max(0.0, self.end_s(buckets) - backward_s)
        return exposed + hidden_cost * max(0.0, sum(map(self.seconds, buckets)) - exposed)


def optimal_buckets(costs: Costs, seconds: npt.NDArray[np.float64]) -> list[Bucket]:
    """Returns the buckets whose all-reduces end first, in the most exact formats that permit this.

    Joined buckets take the more exact of their formats, so no gradient becomes less exact.

    Args:
        costs: Ready times and costs.
        seconds: `seconds[i, j]` is the cost of the bucket with the gradients i to j − 1 in its cheapest
            format.
    """
    cheapest = [costs.cheapest(cut) for cut in optimal_cuts(costs.ready_s, seconds)]
    by_s = costs.end_s(cheapest) * (1 + 1e-12)
    return _more_exact(_joined(_more_exact(cheapest, costs, by_s), costs, by_s), costs, by_s)


def _fewer_buckets(
    costs: Costs, seconds: npt.NDArray[np.float64], count: int
) -> list[list[Bucket]]:
    """Returns the plans that end first if at most 1, 2, … buckets are allowed.

    The largest number is below `count` and at most `_MOST_FEWER`.
    """
    candidates = []
    for most in range(1, min(count, _MOST_FEWER + 1)):
        cheapest = [costs.cheapest(cut) for cut in limited_cuts(costs.ready_s, seconds, most)]
        candidates.append(_more_exact(cheapest, costs, costs.end_s(cheapest) * (1 + 1e-12)))
    return candidates


def limited_cuts(ready_s: Sequence[float], cost: npt.NDArray[np.float64], most: int) -> list[Cut]:
    """Divides gradients into at most `most` buckets, and otherwise does the same as `optimal_cuts`."""
    count = len(ready_s)
    starts = np.concatenate([[0.0], ready_s])
    ends = np.concatenate([[0.0], starts[1:] + cost[0, 1:]])
    origins = [np.zeros(count + 1, dtype=np.int64)]
    for _ in range(most - 1):
        # candidates[i, j]: the end if the last run contains the gradients i to j − 1, and the gradients
        # before i are in at least one run fewer.
        candidates = np.maximum(ends[:, None], starts[None, :]) + cost
        candidates[np.tril_indices(count + 1)] = np.inf
        origins.append(candidates.argmin(axis=0))
        ends = np.concatenate([[0.0], candidates.min(axis=0)[1:]])
    return _walked_back(reversed(origins), count)


def optimal_cuts(ready_s: Sequence[float], cost: npt.NDArray[np.float64]) -> list[Cut]:
    """Divides gradients into the buckets whose all-reduces end first, as pairs (first, stop).

    Args:
        ready_s: The seconds after which each gradient is ready.
        cost: `cost[i, j]` is the seconds of a bucket with the gradients i to j − 1.
    """
    count = len(ready_s)
    ends = np.zeros(count + 1)
    origin = np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        candidates = np.maximum(ends[:stop], ready_s[stop - 1]) + cost[:stop, stop]
        origin[stop] = candidates.argmin()
        ends[stop] = candidates[origin[stop]]
    return _walked_back(repeat(origin), count)


def _walked_back(origins: Iterable[npt.NDArray[np.int64]], count: int) -> list[Cut]:
    """Returns the buckets of the best division of the first `count` gradients.

    Args:
        origins: For each bucket from the last one back, an array. Element j is the first gradient
            of the best bucket that ends at j.
        count: Number of gradients.
    """
    cuts: list[Cut] = []
    for origin in origins:
        if not count:
            break
        cuts.append((int(origin[count]), count))
        count = int(origin[count])
    return cuts[::-1]


def _more_exact(buckets: Sequence[Bucket], costs: Costs, by_s: float) -> list[Bucket]:
    """Gives each bucket the most exact number format with which communication still ends at `by_s`.

    Starts with the last bucket. A bucket must end before the next bucket has to start. No bucket
    gets a less exact format.
    """
    starts, free = [], 0.0
    for bucket in buckets:
        starts.append(costs.start_s(bucket, free))
        free = starts[-1] + costs.seconds(bucket)
    chosen = []
    for bucket, start in zip(reversed(buckets), reversed(starts), strict=True):
        better = costs.wires[: costs.wires.index(bucket.wire)]
        options = (
            one for wire in better if start + costs.seconds(one := Bucket(bucket.cut, wire)) <= by_s
        )
        chosen.append(next(options, bucket))
        by_s -= costs.seconds(chosen[-1])
    return chosen[::-1]


def _joined(buckets: Sequence[Bucket], costs: Costs, by_s: float) -> list[Bucket]:
    """Joins neighboring buckets if communication still ends at `by_s`, to send fewer messages.

    The joined bucket has the more exact format of the two.
    """
    latest = [by_s]  # when the channel must be free for later buckets, the last bucket first
    for bucket in reversed(buckets[1:]):
        latest.append(latest[-1] - costs.seconds(bucket))
    latest.reverse()
    joined, free, last = [], 0.0, buckets[0]
    for bucket, due in zip(buckets[1:], latest[1:], strict=True):
        wire = min((last.wire, bucket.wire), key=costs.wires.index)
        both = Bucket((last.cut[0], bucket.cut[1]), wire)
        if costs.start_s(both, free) + costs.seconds(both) <= due:
            last = both
            continue
        free = costs.start_s(last, free) + costs.seconds(last)
        joined.append(last)
        last = bucket
    return [*joined, last]


Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class BucketCost:
    """The predicted seconds of all possible buckets.

    `seconds[i, j]` is the cost of the bucket with the gradients i to j − 1 in its cheapest format.
    """

    def __init__(
        self, gradients: Sequence[Gradient], cluster: Cluster, algorithms: Sequence[str],
        wires: Sequence[str] = ("auto",),
    ) -> None:  # fmt: skip
        if not algorithms:
            known = ", ".join(algorithm_names())
            raise ConfigError("--algorithm", None, "no algorithm given", f"use {known}")
        algorithms = [name for name in algorithms if is_priced(name, cluster)] or algorithms
        self.wires = wire_names(wires)
        if not self.wires:
            raise ConfigError("--wire", None, "no format given", "use auto")
        counts = np.array([[g.elements * g.half, g.elements * (not g.half)] for g in gradients])
        held, in_buckets = _runs(counts), _runs(padded(counts))
        tables = [_WireCost(held, in_buckets, wire, cluster, algorithms) for wire in self.wires]
        self._by_wire = dict(zip(self.wires, tables, strict=True))
        self.seconds: Floats = np.minimum.reduce([table.seconds for table in tables])

    def bytes(self, first: int, stop: int) -> int:
        """Returns the bytes of a bucket of gradients `first` to `stop` − 1 in the most exact format."""
        return int(self._by_wire[self.wires[0]].bytes[first, stop])

    def of(self, wire: str, first: int, stop: int) -> float:
        """Returns the seconds of the bucket with the gradients `first` to `stop` − 1 in format `wire`."""
        return float(self._by_wire[wire].seconds[first, stop])

    def names(self, wire: str, first: int, stop: int) -> tuple[str, str]:
        """Returns the algorithms for the bucket's larger message and for its smaller messages."""
        return self._by_wire[wire].names(first, stop)


def _runs(counts: Counts) -> Counts:
    """Returns how many elements the gradients i to j − 1 have, as an array [kind, i, j].

    Args:
        counts: For each gradient its number of 16-bit and of 32-bit elements; these are the two kinds.
    """
    before = np.concatenate([np.zeros((1, 2), dtype=np.int64), counts.cumsum(axis=0)]).T
    return np.asarray(before[:, None, :] - before[:, :, None])


class _WireCost:
    """The predicted seconds of all possible buckets in one number format."""

    def __init__(
        self, held: Counts, in_buckets: Counts, wire: str, cluster: Cluster,
        algorithms: Sequence[str],
    ) -> None:  # fmt: skip
        self._cluster, self._others = cluster, tuple(algorithms)
        # A format with its own all-reduce uses no other one; the signals can use any algorithm.
        self._own, self._own_cost = wire_format(wire).algorithm, wire_format(wire).cost
        self._algorithms = (self._own,) if self._own else self._others
        half, full = held
        narrow, wide, cast = travelling(half.astype(float), full.astype(float), wire)
        self.bytes: Floats = narrow + wide
        # The last bucket sends the signals within its fp32 message or as a separate message.
        signals = signal_bytes(len(half) - 1)
        rides = (full[:, -1] > 0) & keeps_float32(wire)
        wide[:, -1] += np.where(rides, signals, 0)
        self._tail: Floats = np.where(rides, 0.0, float(signals))
        bulk_is_wide = wide_is_bulk(in_buckets[0], in_buckets[1], wire)
        self._large = np.where(bulk_is_wide, wide, narrow)
        self._small = np.where(bulk_is_wide, narrow, wide)
        beside = self._times(self._small)
        if self._own:
            beside[:, :, -1] += self._signal_times(self._tail).min(axis=0)
        else:
            beside[:, :, -1] += self._times(self._tail)
        bulk = self._times(self._large)
        self.seconds: Floats = bulk.min(axis=0) + beside.min(axis=0) + cast * cluster.cast_s
        if cluster.ranks == 1:
            self.seconds[:] = 0.0

    def _times(self, sizes: npt.ArrayLike) -> Floats:
        """Returns the seconds for each algorithm (first dimension) and each of `sizes` in bytes."""
        own = self._own_cost
        return np.stack([all_reduce_s(n, self._cluster, sizes, own) for n in self._algorithms])

    def _signal_times(self, sizes: npt.ArrayLike) -> Floats:
        return np.stack([all_reduce_s(name, self._cluster, sizes) for name in self._others])

    def names(self, first: int, stop: int) -> tuple[str, str]:
        if self._own:
            fastest = self._signal_times(self._tail.max()).argmin()
            return self._own, self._others[int(fastest)]
        small = self._times(self._small[first, stop])
        if stop == len(self._tail) - 1:
            small = small + self._times(self._tail[first])
        bulk = self._algorithms[int(self._times(self._large[first, stop]).argmin())]
        beside = self._algorithms[int(small.argmin())] if small.any() else bulk
        return bulk, beside
