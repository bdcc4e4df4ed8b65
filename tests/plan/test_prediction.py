"""Overlap, predictions, and scaling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.plan.cluster import slowest_of
from paceline.plan.optimizer import best_plan, threshold_plan
from paceline.plan.schedules import algorithm_names
from paceline.planner.accelerators import accelerator, catalogue, gpu_cluster
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import (
    Question,
    largest_ranks,
)
from paceline.planner.layers import network
from paceline.planner.prediction import StepTimes, exchanges, exposed_s, predict

P40 = accelerator("P40")


def question(model: str = "resnet50", batch: int = 64) -> Question:
    return Question(analytic_workload(network(model), P40), batch, algorithm_names())


def test_an_exchange_waits_for_its_bucket_and_for_the_channel() -> None:
    made = exchanges([1.0, 2.0, 5.0], [2.0, 1.0, 1.0])
    assert [(m.start_s, m.end_s) for m in made] == [(1, 3), (3, 4), (5, 6)]
    assert exposed_s([1.0, 2.0, 5.0], [2.0, 1.0, 1.0], 5.0) == 1
    assert exposed_s([], [], 5.0) == 0


def test_an_iteration_is_as_long_as_what_is_not_hidden() -> None:
    """Of 0.3 s of exchanges, 0.1 s are exposed; the hidden 0.2 s cost half as much."""
    times = StepTimes(0.0, 0.1, 0.4, 0.05, (0.2,), (0.3,), hidden_cost=0.5)
    assert times.slowed_s() == pytest.approx(0.1)
    assert times.overlapped() == pytest.approx(0.1 + 0.4 + 0.05 + 0.1 + 0.1)
    assert replace(times, ready_s=(0.4,)).slowed_s() == pytest.approx(0, abs=1e-12)
    assert replace(times, hidden_cost=0.0).overlapped() == pytest.approx(0.65)
    # Input that takes longer than all of it is what the step waits for.
    assert replace(times, input_s=0.9).overlapped() == pytest.approx(0.9)


def test_the_expected_slowest_is_that_of_many_draws() -> None:
    draw = np.random.default_rng(0)
    for ranks in (2, 16, 256):
        found = 1 + 0.03 * draw.standard_normal((4000, ranks)).max(axis=1).mean()
        assert slowest_of(ranks, 0.03) == pytest.approx(found, rel=0.002)
    assert slowest_of(1) == 1


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "CPU"])
def test_large_clusters_and_small_batches_stay_sane(name: str) -> None:
    """From 4 images and up to 8,192 GPUs, efficiency falls with the nodes, speed rises with the batch,
    and a step never becomes shorter with either."""
    gpu = accelerator(name)
    work = analytic_workload(network("resnet50"), gpu)
    curve = []
    for nodes in (1, 2, 16, 128, 1024):
        place = gpu_cluster(gpu, nodes, 8, 800, links=8)
        steps, speeds = [], []
        for batch in (4, 16, 64, 256):
            plan = best_plan(work, place, batch, ("native",))
            found = predict(work, place, plan, batch)
            steps.append(found.step_s)
            speeds.append(found.images_per_s)
        assert steps == sorted(steps)
        assert speeds == sorted(speeds)
        curve.append(steps)
    for steps_of_a_batch in zip(*curve, strict=True):
        assert list(steps_of_a_batch) == sorted(steps_of_a_batch)


def test_the_largest_job_that_stays_efficient() -> None:
    ask, place = question("alexnet", 128), gpu_cluster(P40, 4, 4, 10)
    most = largest_ranks(ask, place, 0.5)
    assert ask.answer(place.with_nodes(most // 4)).efficiency >= 0.5
    assert ask.answer(place.with_nodes(most // 4 * 2)).efficiency < 0.5
    assert largest_ranks(ask, place, 1.1) is None


def test_each_technique_of_the_paper_gains() -> None:
    """A ring for every gradient; fused buckets; hierarchical or ring by size; the best plan."""
    ask, place = question(), gpu_cluster(P40, 128, 8, 100)

    def best(names: tuple[str, ...], thresholds: tuple[int, ...]) -> float:
        plans = [threshold_plan(ask.workload, place, size, names) for size in thresholds]
        return max(predict(ask.workload, place, plan, 64).images_per_s for plan in plans)

    sizes = tuple(1 << power for power in range(16, 29))
    speeds = [
        best(("ring",), (0,)), best(("ring",), sizes), best(("ring", "hierarchical"), sizes),
        ask.answer(place).images_per_s,
    ]  # fmt: skip
    assert speeds == sorted(speeds)
    assert speeds[-1] > 5 * speeds[0]


def test_what_is_hidden_counts_where_it_costs() -> None:
    ask, place = question(), gpu_cluster(P40, 16, 8, 100)
    plan = best_plan(ask.workload, place, 64)
    free, slowed = (
        predict(ask.workload, replace(place, hidden_cost=cost), plan, 64) for cost in (0.0, 0.25)
    )
    hidden_s = sum(score.cost_s for score in free.scores) - free.exposed_comm_s
    assert free.hidden_comm_s == 0
    assert slowed.hidden_comm_s == pytest.approx(0.25 * hidden_s)
    assert slowed.step_s == pytest.approx(free.step_s + slowed.hidden_comm_s)
    assert slowed.input_stall_s == pytest.approx(free.input_stall_s, abs=1e-12)
    expected = slowed.expected()
    parts = expected.compute_s + expected.exposed_comm_s + expected.input_stall_s
    assert parts == pytest.approx(expected.step_s)
