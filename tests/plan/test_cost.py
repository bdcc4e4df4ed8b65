"""Costs: closed forms of the literature, and measured times."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import COSTS, ProbedTable, all_reduce_s, is_priced
from paceline.plan.optimizer import best_plan
from plan.made import made_workload

A, B, G = 3e-6, 2e-10, 5e-11
A2, B2 = 2e-5, 3e-9
M = 1e7


def flat(p: int) -> Cluster:
    return Cluster(1, p, Link(A, B), Link(A2, B2), gamma_s=G)


def two_levels(h: int, k: int, links: int = 1, gamma_s: float = G) -> Cluster:
    return Cluster(h, k, Link(A, B), Link(A2, B2), links=links, gamma_s=gamma_s)


def test_the_literatures_formulas() -> None:
    for p in (2, 3, 8, 1000):
        share, depth = (p - 1) / p, math.ceil(math.log2(p))
        assert all_reduce_s("ring", flat(p), M) == pytest.approx(
            2 * (p - 1) * A + 2 * share * M * B + share * M * G
        )
        assert all_reduce_s("tree", flat(p), M) == pytest.approx(
            2 * depth * (A + M * B) + depth * M * G
        )
    for p, core in ((8, 8), (1024, 1024), (12, 8), (1000, 512)):
        share, more = (core - 1) / core, core != p
        assert all_reduce_s("halving_doubling", flat(p), M) == pytest.approx(
            2 * math.log2(core) * A + 2 * share * M * B + share * M * G
            + more * (2 * A + 2 * M * B + M * G)
        )  # fmt: skip
    h, k = 64, 16
    inside, outside = (k - 1) / k, (h - 1) / h
    assert all_reduce_s("hierarchical", two_levels(h, k), M) == pytest.approx(
        4 * (k - 1) * A + 4 * inside * M * B + 2 * (h - 1) * A2 + 2 * outside * M * B2
        + (inside + outside) * M * G
    )  # fmt: skip
    assert all_reduce_s("torus2d", two_levels(h, k, 2), M) == pytest.approx(
        2 * (k - 1) * A + 2 * inside * M * B + 2 * (h - 1) * A2 + 2 * outside * (M / k) * 8 * B2
        + (inside + outside / k) * M * G
    )  # fmt: skip
    # The paper's: 1024 ranks in groups of 16, 2046 start-ups become 186.
    ones = Cluster(64, 16, Link(1.0, 0.0), Link(1.0, 0.0))
    assert float(all_reduce_s("ring", ones, 1)) == 2046
    assert float(all_reduce_s("hierarchical", ones, 1)) == 186


def test_native_is_the_faster_of_rings_and_tree_over_all_links() -> None:
    h, k, links = 8, 4, 2
    beta = max(B, B2 / links)
    ring = 2 * h * ((k - 1) * A + A2) + 2 * (h * k - 1) / (h * k) * M * beta + M * G
    tree = 2 * (3 * A2 + (k - 1) * A) + 2 * M * beta + M * G
    assert all_reduce_s("native", two_levels(h, k, links), M) == pytest.approx(min(ring, tree))
    # Many nodes with slow start-ups inside: the tree, whose cost is the chains inside the nodes.
    slow = Cluster(64, k, Link(50 * A, B), Link(A2, B2), links=links, gamma_s=G)
    chains = 2 * (6 * A2 + (k - 1) * 50 * A)
    assert all_reduce_s("native", slow, 1.0) == pytest.approx(chains + 2 * beta + G)
    assert all_reduce_s("native", flat(8), M) == all_reduce_s("ring", flat(8), M)


@given(
    st.sampled_from(sorted(COSTS)), st.integers(1, 300), st.integers(1, 16),
    st.floats(1, 1e9), st.floats(1, 1e9),
)  # fmt: skip
def test_more_bytes_never_cost_less(name: str, h: int, k: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    found = all_reduce_s(name, two_levels(h, k), [0, small, large])
    assert found[0] == 0
    assert 0 <= found[1] <= found[2]


def test_what_costs_nothing_and_what_is_paid_once() -> None:
    assert float(all_reduce_s("ring", flat(1), M)) == 0
    paid = replace(flat(4), launch_s=1.0)
    assert (
        all_reduce_s("ring", paid, [0, 8]) - all_reduce_s("ring", flat(4), [0, 8])
    ).tolist() == (pytest.approx([0, 1.0]))
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        all_reduce_s("rign", flat(4), 1)


def test_an_algorithm_without_a_closed_form_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(COSTS, "ring")
    with pytest.raises(ConfigError, match="has no formula"):
        all_reduce_s("ring", flat(4), M)
    points = {name: [(1024.0, 1e-6), (4096.0, 1e-6)] for name in ("ring", "tree")}
    tuned = replace(two_levels(2, 2), probed=ProbedTable.of(two_levels(2, 2), points, "tree"))
    assert [is_priced("ring", place) for place in (tuned, tuned.with_nodes(4))] == [True, False]
    many = two_levels(8, 2)
    assert best_plan(made_workload(), many, 8, ("ring", "tree")).buckets[0].algorithm == "tree"


BASE = Cluster(2, 2, Link(1e-5, 1e-8), Link(1e-5, 1e-8))


def test_measured_sizes_come_back_and_others_lie_between() -> None:
    points = {
        "native": [(1024.0, 0.01), (2.0**20, 0.05)],
        "tree": [(2.0**20, 0.4), (1024.0, 0.001)],
    }
    place = replace(BASE, probed=ProbedTable.of(BASE, points, "ring"))
    found = all_reduce_s("tree", place, [0, 1, 1024, 2**15, 2**20, 2**22])
    assert found.tolist() == pytest.approx([0, 0.001, 0.001, 0.02, 0.4, 1.6])
    for elements, name in ((100, "tree"), (500_000, "native")):
        plan = best_plan(made_workload((elements,)), place, 1, ("native", "tree"))
        assert plan.buckets[0].algorithm == name


def test_formulas_measured_are_formulas_elsewhere() -> None:
    """Medians that are the formulas' own must follow them to other nodes and links."""
    sizes = [1024 * 4**n for n in range(8)]
    names = ("ring", "hierarchical", "torus2d", "tree")
    points = {n: [(float(s), float(all_reduce_s(n, BASE, s))) for s in sizes] for n in names}
    probed = replace(BASE, probed=ProbedTable.of(BASE, points, "ring"))
    for nodes in (1, 2, 16, 1024):
        for name in names:
            wanted = all_reduce_s(name, BASE.with_nodes(nodes), sizes)
            assert all_reduce_s(name, probed.with_nodes(nodes), sizes) == pytest.approx(wanted)
    faster = replace(probed, inter=Link(1e-5, 5e-9))
    assert np.all(all_reduce_s("ring", faster, sizes) <= all_reduce_s("ring", probed, sizes))
