from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.plan.accelerator import accelerator
from paceline.plan.analytic_workload import analytic_workload
from paceline.plan.choose_plan import ALGORITHMS
from paceline.plan.expected import Expected
from paceline.plan.gpu_cluster import gpu_cluster
from paceline.plan.network import network
from paceline.plan.scaling import Question, advise, largest_ranks, node_counts, scaling_curve
from paceline.plan.techniques import techniques

P40 = accelerator("P40")


def question(model: str = "resnet50", batch: int = 64) -> Question:
    return Question(analytic_workload(network(model), P40), batch, ALGORITHMS)


def test_efficiency_falls_with_ranks() -> None:
    curve = scaling_curve(question(), gpu_cluster(P40, 16, 8, 100))
    found = [point.efficiency for point in curve]
    assert found == sorted(found, reverse=True)
    assert [point.ranks for point in curve] == [8, 16, 32, 64, 128, 256]


def test_the_cluster_itself_is_on_the_curve() -> None:
    assert 24 in node_counts(gpu_cluster(P40, 24, 8, 100))


def test_the_largest_job_that_stays_efficient() -> None:
    ask, place = question("alexnet", 128), gpu_cluster(P40, 4, 4, 10)
    most = largest_ranks(ask, place, 0.5)
    assert most is not None
    assert ask.answer(place.with_nodes(most // 4)).efficiency >= 0.5
    assert ask.answer(place.with_nodes(most // 4 * 2)).efficiency < 0.5
    assert largest_ranks(ask, place, 1.1) is None


def test_the_advice_fits_the_bottleneck() -> None:
    ask, place = question("alexnet", 32), gpu_cluster(P40, 16, 8, 10)
    advice = advise(ask, place, ask.answer(place))
    assert advice[0].change in ("twice the bandwidth between nodes", "twice the batch a GPU")
    assert advice[0].gain > 0.5
    alone = advise(ask, place.with_nodes(1), ask.answer(place.with_nodes(1)))
    assert not any("between nodes" in one.change for one in alone)


def test_each_technique_gains() -> None:
    ask = question()
    found = techniques(ask.workload, gpu_cluster(P40, 128, 8, 100), 64)
    speeds = [found[name].images_per_s for name in ("none", "fusion", "hybrid", "best plan")]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 5 * speeds[0]


def test_what_is_hidden_counts_where_it_costs() -> None:
    ask, place = question(), gpu_cluster(P40, 16, 8, 100)
    free, slowed = ask.answer(place), ask.answer(replace(place, hidden_cost=0.25))
    hidden_s = sum(score.cost_s for score in free.scores) - free.exposed_comm_s
    assert free.hidden_comm_s == 0
    assert slowed.hidden_comm_s == pytest.approx(0.25 * hidden_s)
    assert slowed.step_s == pytest.approx(free.step_s + slowed.hidden_comm_s)
    assert slowed.input_stall_s == pytest.approx(free.input_stall_s, abs=1e-12)
    expected = Expected.of(slowed)
    parts = expected.compute_s + expected.exposed_comm_s + expected.input_stall_s
    assert parts == pytest.approx(expected.step_s)
