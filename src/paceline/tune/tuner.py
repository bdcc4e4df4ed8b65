"""Measures this cluster, and plans the gradient all-reduce of a model on it (`paceline tune`).

The result is a `PlanFile`, which is equal on every rank. At each message size, two samples of every
algorithm are taken first, and then more samples of the algorithms that are close to the fastest.
Sizes are measured in ascending order; those for which the time limit leaves no time are reported as
missing. Rank 0 decides for all ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from paceline.comm.hybrid import HybridAllReduce
from paceline.comm.link_probe import LinkProbe
from paceline.plan.cluster import Cluster
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.optimizer import best_plan, threshold_plan
from paceline.plan.plan_file import ModelFacts, PlanFile, ProbedCluster
from paceline.plan.schedules import NATIVE
from paceline.plan.size_choice import choose_algorithms, measured_size, table_of
from paceline.plan.size_table import MeasuredSize, SizeTable
from paceline.planner.plan_parts import planned_cluster
from paceline.planner.prediction import Prediction, predict
from paceline.planner.workload import Workload
from paceline.tune.timing import RankGroup, interleaved

# An algorithm is not sampled again if its first samples took more than this many times the fastest.
_SCREEN = 1.6
_SCREENING_ROUNDS = 2
# The bucket size in bytes of a run without a plan; such a run uses the backend's own all-reduce.
_DEFAULT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TuneJob:
    """The buffer sizes and all-reduce algorithms that `Tuner` measures.

    `iterations` is the number of samples of each algorithm and size. `margin` is passed to
    `size_choice.choose_algorithms`. `limit_s` bounds the seconds of all sizes together; at least
    one size is measured.
    """

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    iterations: int = 12
    limit_s: float = 180.0
    margin: float = 0.05


OnSize = Callable[[MeasuredSize], None]


class Tuner:
    """Measures links and all-reduces. All ranks must call the methods in the same order."""

    def __init__(self, ranks: RankGroup, job: TuneJob) -> None:
        self._ranks, self.job = ranks, job
        names = dict.fromkeys((NATIVE, *job.algorithms))
        self._made = {name: HybridAllReduce(ranks.groups, SizeTable.single(name)) for name in names}

    def cluster(self) -> ProbedCluster:
        """Measures the links in and between nodes, and how much communication slows down compute."""
        ranks = self._ranks
        assert ranks.groups.world is not None
        probe = LinkProbe(ranks.groups.world, ranks.rank, ranks.nodes, ranks.device)
        counts = tuple(len(node) for node in ranks.nodes)
        inside, between = ranks.group.watched(
            "the probe of the links", lambda: (probe.inside(), probe.between())
        )
        return ProbedCluster(
            counts, ranks.group.backend, ranks.device.type, inside, between, hidden_cost(ranks)
        )

    def measure(self, on_size: OnSize) -> list[MeasuredSize]:
        """Measures all-reduces at each buffer size until the time limit.

        Calls `on_size` after each size.
        """
        measured: list[MeasuredSize] = []
        start, last_s = time.perf_counter(), 0.0
        for at, size in enumerate(self.job.sizes):
            begun = time.perf_counter()
            left_s = self.job.limit_s - (begun - start)
            share_s = left_s / (len(self.job.sizes) - at)
            # Sizes ascend, so the next one takes at least as long as the last one did.
            late = self._ranks.rank == 0 and bool(measured) and left_s < last_s
            if self._ranks.agree_max(float(late)) > 0:
                break
            measured.append(self._measure(size, share_s))
            last_s = time.perf_counter() - begun
            on_size(measured[-1])
        return measured

    def _measure(self, size: int, limit_s: float) -> MeasuredSize:
        buffer = torch.empty(max(size // 4, 1), device=self._ranks.device)
        ways: dict[str, Callable[[], object]] = {
            name: partial(made.all_reduce, buffer) for name, made in self._made.items()
        }

        def zero() -> None:
            buffer.zero_()

        screened = interleaved(
            self._ranks, ways, iterations=_SCREENING_ROUNDS, warm_up=1, prepare=zero
        )
        kept = self._ranks.decided(lambda: near_the_best(screened))
        samples = interleaved(
            self._ranks, {name: ways[name] for name in kept}, iterations=self.job.iterations,
            warm_up=0, prepare=zero, limit_s=limit_s,
        )  # fmt: skip
        return measured_size(size, {**screened, **samples})

    def conclude(self, measured: list[MeasuredSize], probed: ProbedCluster) -> PlanFile:
        """Returns a plan file with the links, the measurements and rank 0's choice of algorithms."""
        chosen = self._ranks.decided(lambda: choose_algorithms(measured, self.job.margin))
        return PlanFile(
            cluster=probed.facts, sizes=table_of(measured, chosen), measured=tuple(measured),
            chosen=tuple(chosen), probed=probed,
        )  # fmt: skip


def plan_model(tuned: PlanFile, work: Workload, batch: int) -> PlanFile:
    """Adds to `tuned` the best plan for a model, the predicted step time, and the reasons.

    Args:
        tuned: The plan file with the measurements of the cluster.
        work: The profiled step of the model.
        batch: Number of images in the batch of one rank.
    """
    cluster = planned_cluster(tuned)
    names = cluster.probed.algorithms if cluster.probed else None
    plan = best_plan(work, cluster, batch, names)
    now = predict(work, cluster, plan, batch)
    default = predict(work, cluster, threshold_plan(work, cluster, _DEFAULT_BYTES), batch)
    return replace(
        tuned,
        fusion=plan,
        model=ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients),
        expected=now.expected(),
        workload=work.to_section(),
        why=(*tuned.why, *_reasons(work, cluster, plan, now, default)),
    )


def _reasons(
    work: Workload, cluster: Cluster, plan: FusionPlan, now: Prediction, default: Prediction
) -> list[str]:
    names = ", ".join(dict.fromkeys(buffer.algorithm for buffer in plan.buckets))
    return [
        f"measured: {work.model}, {work.source}: {1e3 * work.compute_s(now.batch):.3g} ms a step at "
        f"batch {now.batch} without communication, {work.elements:,} trained elements",
        f"chosen: {len(plan.buckets)} buckets by {names}, which end the last exchange soonest; native "
        f"all-reduces of 16 MiB buckets are expected to take {1e3 * default.step_s:.3g} ms a step",
        f"expected: {1e3 * now.step_s:.3g} ms a step ± {now.uncertainty:.0%} on {cluster.ranks} ranks, "
        f"{1e3 * now.exposed_comm_s:.3g} ms of it exposed communication; {now.images_per_s:,.0f} "
        f"images/s, {now.efficiency:.0%} of {cluster.ranks} ranks alone",
    ]


def near_the_best(screened: Mapping[str, list[float]]) -> list[str]:
    """Returns the algorithms to measure more often: the backend's own, and those near the fastest.

    `screened` has a few samples of each algorithm.
    """
    best = min(min(taken) for taken in screened.values())
    return [
        name for name, taken in screened.items() if name == NATIVE or min(taken) <= _SCREEN * best
    ]


_BYTES = 512 * 1024
# The side of a square matrix; multiplying two such matrices is short compared to an exchange.
_EDGE = 160
_PIECES = 200
_ROUNDS = 5
# Least and most exchanges in a round, and the seconds that they take together, approximately.
_LEAST, _MOST, _SENDING_S = 4, 40, 1.0
_LONGEST_S = 1.0


def hidden_cost(ranks: RankGroup) -> float | None:
    """Measures how much an all-reduce delays compute that runs at the same time, on CPU ranks.

    Returns the delay as a fraction of the all-reduce's time, averaged over ranks. Returns None on a
    GPU, on one rank, or if an all-reduce takes too long. Each rank computes with one thread.
    """
    if ranks.device.type != "cpu" or ranks.size < 2:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _HiddenCostProbe(ranks).measure()
    finally:
        torch.set_num_threads(threads)


class _HiddenCostProbe:
    """Measures how much an all-reduce delays simultaneous compute.

    All ranks must call every method.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._buffer = torch.zeros(_BYTES // 4)
        self._matrix = torch.randn(_EDGE, _EDGE) / math.sqrt(_EDGE)
        self._result = torch.empty_like(self._matrix)

    def measure(self) -> float | None:
        """Returns the delay divided by the all-reduce's time, or None if an all-reduce is too slow."""
        ranks = self._ranks
        self._compute(_PIECES)  # warm-up
        if ranks.slowest([ranks.timed(lambda: self._send().wait())])[0] > _LONGEST_S:
            return None
        exchange_s = self._slowest(lambda: self._send().wait())
        own = [ranks.timed(lambda: self._compute(_PIECES)) for _ in range(_ROUNDS)]
        piece_s = statistics.median(own) / _PIECES
        # The count is equal on all ranks, because all of them have the slowest rank's time.
        count = min(max(round(_SENDING_S / exchange_s), _LEAST), _MOST)
        costs = []
        for _ in range(_ROUNDS):
            ranks.barrier()
            taken_s, pieces = self._both(count)
            costs.append((taken_s - pieces * piece_s) / (count * exchange_s))
        mean = torch.tensor([statistics.median(costs)], dtype=torch.float64)
        ranks.group.completed("the mean of a cost", lambda: dist.all_reduce(mean))
        return max(0.0, float(mean) / ranks.size)

    def _slowest(self, work: Callable[[], object]) -> float:
        """Times `work` several times and returns the median of the slowest rank's times."""
        taken = [self._ranks.timed(work) for _ in range(_ROUNDS + 1)]
        return statistics.median(self._ranks.slowest(taken[1:]))

    def _compute(self, pieces: int) -> None:
        for _ in range(pieces):
            torch.mm(self._matrix, self._matrix, out=self._result)

    def _send(self) -> dist.Work:
        work: dist.Work | None = dist.all_reduce(
            self._buffer, group=self._ranks.groups.world, async_op=True
        )
        assert work is not None
        return work

    def _both(self, count: int) -> tuple[float, int]:
        """Runs `count` successive all-reduces and multiplies matrices at the same time.

        Returns the seconds of all all-reduces, and the number of matrix products computed in that
        time.
        """
        begun, sent, pieces = time.perf_counter(), 1, 0
        under_way = self._send()
        while True:
            self._compute(1)
            pieces += 1
            if under_way.is_completed():
                under_way.wait()
                if sent == count:
                    return time.perf_counter() - begun, pieces
                under_way, sent = self._send(), sent + 1
