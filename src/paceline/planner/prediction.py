"""Predicts the step time of a job: its parts, speed, scaling efficiency and uncertainty.

The input is a plan: the buckets of gradients and the algorithm of each all-reduce. Training
executes the same plan, so the prediction can be compared with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import ConfigError
from paceline.plan.cluster import RANK_SPREAD, Cluster, Link, slowest_of
from paceline.plan.cost import all_reduce_s
from paceline.plan.fusion_plan import FusionBucket, FusionPlan, padded, signal_bytes
from paceline.plan.optimizer import Gradient
from paceline.plan.plan_file import Expected
from paceline.plan.wires import keeps_float32, travelling, wide_is_bulk, wire_format
from paceline.planner.workload import Workload

# The relative standard error of the input rate.
_INPUT_SPREAD = 0.1


@dataclass(frozen=True)
class BucketScore:
    """The predicted all-reduce of one bucket of gradients.

    `ready_s` is the time from the start of the backward pass until the gradients are ready, and
    `cost_s` is the duration of the all-reduce. `small_algorithm` is the algorithm for the bucket's
    small messages, such as loss and flags.
    """

    tensors: int
    bytes: int
    algorithm: str
    wire: str
    ready_s: float
    cost_s: float
    small_algorithm: str


def score_plan(
    plan: FusionPlan, workload: Workload, cluster: Cluster, batch: int
) -> list[BucketScore]:
    """Computes when the gradients of each bucket are ready, and how long their all-reduce takes.

    Raises:
        ConfigError: If the plan is for another model.
    """
    gradients = {gradient.name: gradient for gradient in workload.gradients}
    plan.check(tuple(gradients))
    backward = workload.backward.at(batch)
    last = plan.buckets[-1]
    signals = signal_bytes(len(gradients))
    return [
        _score(
            bucket, [gradients[name] for name in bucket.tensors], cluster, backward,
            signals if bucket is last else 0,
        )
        for bucket in plan.buckets
    ]  # fmt: skip


def _score(
    bucket: FusionBucket, gradients: list[Gradient], cluster: Cluster, backward_s: float,
    signals: int,
) -> BucketScore:  # fmt: skip
    half, full = (sum(g.elements for g in gradients if g.half == held) for held in (True, False))
    narrow, wide, cast = travelling(half, full, bucket.wire)
    rides = signals if full and keeps_float32(bucket.wire) else 0
    small, large = narrow, wide + rides
    in_half, in_full = (
        sum(padded(g.elements) for g in gradients if g.half == held) for held in (True, False)
    )
    if not wide_is_bulk(in_half, in_full, bucket.wire):
        small, large = large, small
    own_cost = wire_format(bucket.wire).cost
    cost = float(all_reduce_s(bucket.algorithm, cluster, large, own_cost))
    for elements in (small, signals - rides):
        cost += float(all_reduce_s(bucket.beside_algorithm, cluster, elements))
    if cluster.ranks > 1:
        cost += cast * cluster.cast_s
    ready = max((g.ready for g in gradients), default=0.0) * backward_s
    return BucketScore(
        len(gradients), round(narrow + wide), bucket.algorithm, bucket.wire, ready, cost,
        bucket.beside_algorithm,
    )  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """Start and end of the all-reduce of one bucket, in seconds from the start of backward."""

    ready_s: float
    start_s: float
    end_s: float


def exchanges(ready_s: Sequence[float], cost_s: Sequence[float]) -> list[Exchange]:
    """Computes when each bucket's all-reduce starts: it waits for its gradients and the previous one.

    Args:
        ready_s: For each bucket, seconds from the start of backward until its gradients are ready.
        cost_s: For each bucket, the duration of its all-reduce in seconds.
    """
    schedule: list[Exchange] = []
    free = 0.0
    for ready, cost in zip(ready_s, cost_s, strict=True):
        start = max(free, ready)
        free = start + cost
        schedule.append(Exchange(ready, start, free))
    return schedule


def exposed_s(ready_s: Sequence[float], cost_s: Sequence[float], backward_s: float) -> float:
    """Returns the seconds of communication after the end of backward.

    The arguments are as for `exchanges`, with the duration of the backward pass.
    """
    schedule = exchanges(ready_s, cost_s)
    return max(0.0, schedule[-1].end_s - backward_s) if schedule else 0.0


@dataclass(frozen=True)
class StepTimes:
    """The parts of one rank's step in seconds.

    `ready_s` and `cost_s` are as for `exchanges`. One second of communication during the backward
    pass makes the backward pass `hidden_cost` seconds longer.
    """

    input_s: float
    forward_s: float
    backward_s: float
    update_s: float
    ready_s: tuple[float, ...] = ()
    cost_s: tuple[float, ...] = ()
    hidden_cost: float = 0.0

    def overlapped(self) -> float:
        """Returns the step time if input and communication overlap with compute as far as possible."""
        exposed = exposed_s(self.ready_s, self.cost_s, self.backward_s)
        return max(self.input_s, self.compute_s() + exposed + self.slowed_s())

    def slowed_s(self) -> float:
        """Returns the seconds by which concurrent communication slows the backward pass.

        Communication is assumed to become slower by the same time, so the part after the backward
        pass does not change.
        """
        exposed = exposed_s(self.ready_s, self.cost_s, self.backward_s)
        return self.hidden_cost * max(0.0, sum(self.cost_s) - exposed)

    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one step on all ranks, with its parts.

    Attributes:
        ranks: The number of ranks.
        batch: The batch of one rank.
        step_s: The time of the step in seconds.
        compute_s: The seconds of forward, backward and update on the slowest rank.
        exposed_comm_s: The seconds of communication after the end of the backward pass.
        hidden_comm_s: The seconds by which concurrent communication slows the compute.
        input_stall_s: The seconds that the step waits for the input.
        efficiency: The step time of one rank alone, divided by `step_s`.
        uncertainty: The relative standard error of `step_s`.
        scores: The cost and the algorithm of each bucket.
        exchanges: Start and end of the all-reduce of each bucket.
    """

    ranks: int
    batch: int
    step_s: float
    compute_s: float
    exposed_comm_s: float
    hidden_comm_s: float
    input_stall_s: float
    efficiency: float
    uncertainty: float
    scores: tuple[BucketScore, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def images_per_s(self) -> float:
        return self.ranks * self.batch / self.step_s

    @property
    def images_per_s_per_gpu(self) -> float:
        return self.batch / self.step_s

    def expected(self) -> Expected:
        """Returns the predicted times as a section of a plan file, for comparison with a run."""
        return Expected(
            batch=self.batch,
            step_s=self.step_s,
            # A run measures its compute including the slowdown by hidden exchanges.
            compute_s=self.compute_s + self.hidden_comm_s,
            exposed_comm_s=self.exposed_comm_s,
            input_stall_s=self.input_stall_s,
            uncertainty=self.uncertainty,
            buffers_s=tuple(score.cost_s for score in self.scores),
        )

    def steps(self, epochs: float, samples: int) -> int:
        return math.ceil(epochs * samples / (self.ranks * self.batch))

    def epochs_s(self, epochs: float, samples: int) -> float:
        """Returns the seconds of all steps, without start-up and evaluations.

        Args:
            epochs: The number of epochs.
            samples: The number of training images.
        """
        return self.steps(epochs, samples) * self.step_s


def step_times(
    workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int,
    spread: float = RANK_SPREAD,
) -> tuple[StepTimes, list[BucketScore]]:  # fmt: skip
    """Computes the parts of a step on the slowest rank, for which all other ranks wait.

    Args:
        workload: The compute times of a step of one rank.
        cluster: The ranks and the links between them.
        plan: The buckets and algorithms of the gradient all-reduce.
        batch: The batch of one rank.
        spread: The relative standard deviation of the ranks' compute times.

    Raises:
        ConfigError: If `batch` is not positive, or the plan is for another model.
    """
    if batch < 1:
        raise ConfigError("--batch-size", batch, "must be at least 1")
    slow = slowest_of(cluster.ranks, spread)
    scores = score_plan(plan, workload, cluster, batch)
    times = StepTimes(
        input_s=workload.input.at(batch),
        forward_s=workload.forward.at(batch) * slow,
        backward_s=workload.backward.at(batch) * slow,
        update_s=workload.update_s * slow,
        ready_s=tuple(score.ready_s * slow for score in scores),
        cost_s=tuple(score.cost_s for score in scores),
        hidden_cost=cluster.hidden_cost,
    )
    return times, scores


def predict(workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int) -> Prediction:
    """Predicts the step time of a job; arguments and errors as in `step_times`."""
    times, scores = step_times(workload, cluster, plan, batch)
    step = times.overlapped()
    compute = times.compute_s()
    exposed = exposed_s(times.ready_s, times.cost_s, times.backward_s)
    alone = max(workload.compute_s(batch), workload.input.at(batch))
    busy = compute + exposed + times.slowed_s()
    return Prediction(
        ranks=cluster.ranks,
        batch=batch,
        step_s=step,
        compute_s=compute,
        exposed_comm_s=exposed,
        hidden_comm_s=times.slowed_s(),
        # A difference within rounding is not a stall.
        input_stall_s=step - busy if step > busy * (1 + 1e-12) else 0.0,
        efficiency=alone / step,
        uncertainty=_uncertainty(workload, cluster, plan, batch),
        scores=tuple(scores),
        exchanges=tuple(exchanges(times.ready_s, times.cost_s)),
    )


def _uncertainty(workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int) -> float:
    """Returns the relative standard error of the step time.

    Changes each uncertain input by one standard error, and returns the root of the sum of squared
    effects.
    """

    def step(
        work: Workload = workload, there: Cluster = cluster, spread: float = RANK_SPREAD
    ) -> float:
        return step_times(work, there, plan, batch, spread)[0].overlapped()

    base, slower = step(), 1 + workload.spread_at(batch)
    work = replace(
        workload, forward=workload.forward.scaled(slower),
        backward=workload.backward.scaled(slower), update_s=workload.update_s * slower,
    )  # fmt: skip
    changes = [
        step(work),
        step(replace(workload, input=workload.input.scaled(1 + _INPUT_SPREAD))),
        step(there=_changed(cluster, lambda link, f: Link(link.alpha_s * f, link.beta_s))),
        step(there=_changed(cluster, lambda link, f: Link(link.alpha_s, link.beta_s * f))),
        step(spread=1.5 * RANK_SPREAD),
        step(there=replace(cluster, hidden_cost=1.5 * cluster.hidden_cost)),
    ]
    return math.sqrt(sum((change / base - 1) ** 2 for change in changes))


def _changed(cluster: Cluster, change: Callable[[Link, float], Link]) -> Cluster:
    factor = 1 + cluster.spread
    return replace(
        cluster, intra=change(cluster.intra, factor), inter=change(cluster.inter, factor),
        launch_s=cluster.launch_s * factor,
    )  # fmt: skip
