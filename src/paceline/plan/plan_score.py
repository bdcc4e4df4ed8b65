"""What a `FusionPlan` costs, buffer by buffer.

In: any plan for the workload's model, a cluster and the batch of a rank. Out: for each buffer when it is
ready, how long it travels, how many bytes, and by what. The same plan is what the communication module
executes, so that prediction and run can be laid side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.cluster import Cluster
from paceline.plan.collective_cost import all_reduce_s
from paceline.plan.fusion_plan import FusionBuffer, FusionPlan
from paceline.plan.wire_format import (
    keeps_float32,
    padded,
    signal_bytes,
    travelling,
    wide_is_bulk,
)
from paceline.plan.workload import Gradient, Workload


@dataclass(frozen=True)
class BufferScore:
    """`ready_s` is from the start of the backward pass."""

    tensors: int
    bytes: int
    algorithm: str
    wire: str
    ready_s: float
    cost_s: float


def score_plan(
    plan: FusionPlan, workload: Workload, cluster: Cluster, batch: int
) -> list[BufferScore]:
    """ConfigError where the plan is for another model."""
    gradients = {gradient.name: gradient for gradient in workload.gradients}
    plan.check(tuple(gradients))
    backward = workload.backward.at(batch)
    last = plan.buffers[-1]
    signals = signal_bytes(len(gradients))
    return [
        _score(
            buffer, [gradients[name] for name in buffer.tensors], cluster, backward,
            signals if buffer is last else 0,
        )
        for buffer in plan.buffers
    ]  # fmt: skip


def _score(
    buffer: FusionBuffer, gradients: list[Gradient], cluster: Cluster, backward_s: float,
    signals: int,
) -> BufferScore:  # fmt: skip
    counts = [[g.elements * g.half, g.elements * (not g.half)] for g in gradients] or [[0, 0]]
    half, full = np.sum(counts, axis=0)
    narrow, wide, cast = (int(count) for count in travelling(half, full, buffer.wire))
    rides = signals if full and keeps_float32(buffer.wire) else 0
    small, large = narrow, wide + rides
    if not wide_is_bulk(padded(counts).sum(axis=0), buffer.wire):
        small, large = large, small
    cost = float(all_reduce_s(buffer.algorithm, cluster, large))
    for beside in (small, signals - rides):
        cost += float(all_reduce_s(buffer.beside_algorithm, cluster, beside))
    if cluster.ranks > 1:
        cost += cast * cluster.cast_s
    ready = max((g.ready for g in gradients), default=0.0) * backward_s
    return BufferScore(len(gradients), narrow + wide, buffer.algorithm, buffer.wire, ready, cost)
