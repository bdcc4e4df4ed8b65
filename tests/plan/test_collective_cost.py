from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link
from paceline.plan.collective_cost import COSTS, all_reduce_s, central_s, ring_s

A, B, G = 3e-6, 2e-10, 5e-11
A2, B2 = 2e-5, 3e-9
M = 1e7


def flat(p: int) -> Cluster:
    return Cluster(1, p, Link(A, B), Link(A2, B2), gamma_s=G)


def two_levels(h: int, k: int, links: int = 1) -> Cluster:
    return Cluster(h, k, Link(A, B), Link(A2, B2), links=links, gamma_s=G)


def close(found: object, wanted: float) -> None:
    assert float(found) == pytest.approx(wanted, rel=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [2, 3, 8, 1000])
def test_one_level_closed_forms(p: int) -> None:
    share = (p - 1) / p
    close(all_reduce_s("ring", flat(p), M), 2 * (p - 1) * A + 2 * share * M * B + share * M * G)
    depth = math.ceil(math.log2(p))
    close(all_reduce_s("tree", flat(p), M), 2 * depth * (A + M * B) + depth * M * G)
    close(central_s(p, np.float64(M), Link(A, B), 4, G),
          2 * max(p * (A + M * B / 4), 4 * A + M * B) + p * M * G / 4)  # fmt: skip


@pytest.mark.parametrize(
    ("p", "core"), [(2, 2), (8, 8), (1024, 1024), (3, 2), (12, 8), (1000, 512)]
)
def test_halving_doubling(p: int, core: int) -> None:
    share = (core - 1) / core
    wanted = 2 * math.log2(core) * A + 2 * share * M * B + share * M * G
    if core != p:
        wanted += 2 * A + 2 * M * B + M * G
    close(all_reduce_s("halving_doubling", flat(p), M), wanted)


@pytest.mark.parametrize(("h", "k"), [(2, 4), (64, 16), (1, 8), (8, 1)])
def test_hierarchical_and_torus(h: int, k: int) -> None:
    inside, outside = (k - 1) / k, (h - 1) / h
    close(
        all_reduce_s("hierarchical", two_levels(h, k), M),
        4 * (k - 1) * A + 4 * inside * M * B + 2 * (h - 1) * A2 + 2 * outside * M * B2
        + (inside + outside) * M * G,
    )  # fmt: skip
    for links in (1, 2, 16):
        c = max(1, k / links)
        close(
            all_reduce_s("torus2d", two_levels(h, k, links), M),
            2 * (k - 1) * A + 2 * inside * M * B + 2 * (h - 1) * A2
            + 2 * outside * (M / k) * c * B2 + (inside + outside / k) * M * G,
        )  # fmt: skip


def test_the_papers_steps() -> None:
    """1024 ranks in groups of 16: 2046 start-ups become 186."""
    ones = Cluster(64, 16, Link(1.0, 0.0), Link(1.0, 0.0))
    assert float(all_reduce_s("ring", ones, 1)) == 2046
    assert float(all_reduce_s("hierarchical", ones, 1)) == 186


@given(
    st.sampled_from(sorted(COSTS)), st.integers(1, 300), st.integers(1, 16),
    st.floats(1, 1e9), st.floats(1, 1e9),
)  # fmt: skip
def test_more_bytes_never_cost_less(name: str, h: int, k: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    found = all_reduce_s(name, two_levels(h, k), [0, small, large])
    assert found[0] == 0
    assert 0 <= found[1] <= found[2]


def test_one_rank_costs_nothing() -> None:
    assert float(all_reduce_s("ring", flat(1), M)) == 0


def test_a_launch_is_paid_once_a_message() -> None:
    paid = Cluster(1, 4, Link(A, B), Link(A2, B2), launch_s=1.0)
    assert all_reduce_s("ring", paid, [0, 8])[1] == pytest.approx(
        1.0 + float(ring_s(4, np.float64(8), Link(A, B)))
    )
    assert all_reduce_s("ring", paid, [0, 8])[0] == 0


def test_an_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        all_reduce_s("rign", flat(4), 1)


def test_native_is_the_faster_of_rings_and_tree_over_all_links() -> None:
    h, k, links = 8, 4, 2
    beta = max(B, B2 / links)
    ring = 2 * h * ((k - 1) * A + A2) + 2 * (h * k - 1) / (h * k) * M * beta + M * G
    tree = 2 * (3 * A2 + (k - 1) * A) + 2 * M * beta + M * G
    close(all_reduce_s("native", two_levels(h, k, links), M), min(ring, tree))
    # Many nodes with slow start-ups inside: the tree, most of whose cost is the chains inside the nodes.
    slow = Cluster(64, k, Link(50 * A, B), Link(A2, B2), links=links, gamma_s=G)
    chains = 2 * (6 * A2 + (k - 1) * 50 * A)
    close(all_reduce_s("native", slow, 1.0), chains + 2 * beta + G)
    close(all_reduce_s("native", flat(8), M), float(all_reduce_s("ring", flat(8), M)))
