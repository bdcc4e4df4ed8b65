"""`Prediction`: how fast the job will be, where the time goes, and how sure that is.

In: a workload, a cluster, a plan and the batch of a rank. Out: step time and its parts, images/s,
efficiency against one rank alone, each buffer, and the relative standard error that the uncertain figures
behind it amount to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.overlap import Exchange, StepTimes, exchanges, exposed_s
from paceline.plan.plan_score import BufferScore, score_plan
from paceline.plan.straggler import RANK_SPREAD, slowest_of
from paceline.plan.workload import Workload

# What an input delivers is told by hand, or measured elsewhere.
_INPUT_SPREAD = 0.1


@dataclass(frozen=True)
class Prediction:
    """All for one step of the whole job; `hidden_comm_s` is by how much hidden exchanges slow the
    compute; `uncertainty` is relative, one standard error."""

    ranks: int
    batch: int
    step_s: float
    compute_s: float
    exposed_comm_s: float
    hidden_comm_s: float
    input_stall_s: float
    efficiency: float
    uncertainty: float
    scores: tuple[BufferScore, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def images_per_s(self) -> float:
        return self.ranks * self.batch / self.step_s

    @property
    def images_per_s_per_gpu(self) -> float:
        return self.batch / self.step_s

    def epochs_s(self, epochs: float, samples: int) -> float:
        """Training alone, without start and evaluation."""
        steps = math.ceil(epochs * samples / (self.ranks * self.batch))
        return steps * self.step_s


def step_times(
    workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int,
    spread: float = RANK_SPREAD,
) -> tuple[StepTimes, list[BufferScore]]:  # fmt: skip
    """Of the slowest rank, for which the others wait."""
    if batch < 1:
        raise ConfigError("--batch-size", batch, "must be at least 1")
    slow = slowest_of(cluster.ranks, spread)
    scores = score_plan(plan, workload, cluster, batch)
    times = StepTimes(
        input_s=workload.input.at(batch),
        copy_s=0.0,
        forward_s=workload.forward.at(batch) * slow,
        backward_s=workload.backward.at(batch) * slow,
        update_s=workload.update_s * slow,
        ready_s=tuple(score.ready_s * slow for score in scores),
        cost_s=tuple(score.cost_s for score in scores),
        hidden_cost=cluster.hidden_cost,
    )
    return times, scores


def predict(
    workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int,
    spread: float = RANK_SPREAD,
) -> Prediction:  # fmt: skip
    times, scores = step_times(workload, cluster, plan, batch, spread)
    step = times.overlapped()
    compute = times.forward_s + times.backward_s + times.update_s
    exposed = exposed_s(times.ready_s, times.cost_s, times.backward_s)
    alone = max(workload.compute_s(batch), workload.input.at(batch))
    return Prediction(
        ranks=cluster.ranks,
        batch=batch,
        step_s=step,
        compute_s=compute,
        exposed_comm_s=exposed,
        hidden_comm_s=times.slowed_s(),
        input_stall_s=max(0.0, step - compute - exposed - times.slowed_s()),
        efficiency=alone / step,
        uncertainty=_uncertainty(workload, cluster, plan, batch, spread),
        scores=tuple(scores),
        exchanges=tuple(exchanges(times.ready_s, times.cost_s)),
    )


def _uncertainty(
    workload: Workload, cluster: Cluster, plan: FusionPlan, batch: int, spread: float
) -> float:
    """Each uncertain figure one standard error up; what that changes, added as squares."""

    def step(work: Workload, there: Cluster, differ: float) -> float:
        return step_times(work, there, plan, batch, differ)[0].overlapped()

    base = step(workload, cluster, spread)
    slower = 1 + workload.spread
    work = replace(
        workload, forward=workload.forward.scaled(slower),
        backward=workload.backward.scaled(slower), update_s=workload.update_s * slower,
    )  # fmt: skip
    fed = replace(workload, input=workload.input.scaled(1 + _INPUT_SPREAD))
    changes = [
        step(work, cluster, spread),
        step(fed, cluster, spread),
        step(
            workload, _changed(cluster, lambda link, f: Link(link.alpha_s * f, link.beta_s)), spread
        ),
        step(
            workload, _changed(cluster, lambda link, f: Link(link.alpha_s, link.beta_s * f)), spread
        ),
        step(workload, cluster, 1.5 * spread),
        step(workload, replace(cluster, hidden_cost=1.5 * cluster.hidden_cost), spread),
    ]
    return math.sqrt(sum((change / base - 1) ** 2 for change in changes))


def _changed(cluster: Cluster, change: Callable[[Link, float], Link]) -> Cluster:
    factor = 1 + cluster.spread
    return replace(
        cluster, intra=change(cluster.intra, factor), inter=change(cluster.inter, factor),
        launch_s=cluster.launch_s * factor,
    )  # fmt: skip
