from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from paceline.core.errors import ConfigError
from paceline.plan.accelerator import accelerator
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cluster_file import read_cluster
from paceline.plan.gpu_cluster import gpu_cluster

LINK = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9, "residual": 0.1, "contention": 2.0}


def written(path: Path, **cluster: object) -> Path:
    table = {"ranks": 8, "nodes": 2, "ranks_per_node": [4, 4], "backend": "gloo", "device": "cpu"}
    path.write_text(tomli_w.dumps({"cluster": {**table, **cluster}}))
    return path


def test_a_probed_cluster(tmp_path: Path) -> None:
    found = read_cluster(
        written(tmp_path / "c.toml", intra=LINK, inter={**LINK, "beta_s_per_byte": 4e-9})
    )
    assert (found.nodes, found.ranks_per_node, found.ranks) == (2, 4, 8)
    assert found.intra == Link(1e-5, 2e-9)
    assert found.inter == Link(1e-5, 4e-9)
    assert found.hidden_cost == 0
    slowed = written(tmp_path / "d.toml", intra=LINK, hidden_cost=0.3)
    assert read_cluster(slowed).hidden_cost == 0.3


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"ranks_per_node": [4, 3], "intra": LINK}, "nodes differ"),
        ({"ranks_per_node": [1]}, "nothing to exchange"),
        ({"intra": {"alpha_s": 1}}, "beta_s_per_byte"),
        ({"intra": {**LINK, "beta_s_per_byte": -1.0}}, "must be 0 or more"),
        ({"intra": LINK, "hidden_cost": -0.1}, "cost of a hidden exchange"),
        ({"intra": LINK, "hidden_cost": "much"}, "not a cluster"),
        ({"ranks_per_node": [0, 0], "intra": LINK}, "cluster.ranks_per_node"),
        ({"ranks_per_node": [float("inf")], "intra": LINK}, "cluster.ranks_per_node"),
        ({"ranks_per_node": [10**18], "intra": LINK}, "cluster.ranks_per_node"),
        ({"ranks_per_node": [True], "intra": LINK}, "cluster.ranks_per_node"),
        ({"ranks_per_node": "8", "intra": LINK}, "cluster.ranks_per_node"),
        ({"intra": {**LINK, "alpha_s": float("nan")}}, "alpha_s"),
        ({"intra": {**LINK, "contention": [1]}}, "contention"),
        ({"intra": 3}, "not a cluster"),
    ],
)
def test_clusters_that_cannot_be(tmp_path: Path, cluster: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_cluster(written(tmp_path / "c.toml", **cluster))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, "1", [1.0], True])
def test_medians_that_cannot_be(tmp_path: Path, seconds: object) -> None:
    path = written(tmp_path / "c.toml", intra=LINK)
    rows = [{"bytes": size, "median_s": {"native": 1e-3}} for size in (1024, 4096)]
    rows[0]["median_s"] = {"native": seconds}
    path.write_text(tomli_w.dumps({"measured": rows}) + path.read_text())
    with pytest.raises(ConfigError, match="measured"):
        read_cluster(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("= 3")
    (tmp_path / "other.toml").write_text("a = 3")
    for name, words in (("no.toml", "cannot be read"), ("bad.toml", "cannot be read"),
                        ("other.toml", "no \\[cluster\\]")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            read_cluster(tmp_path / name)


@pytest.mark.parametrize("flag", ["nodes", "gpus_per_node", "node_gbps", "latency_us", "links"])
def test_no_figure_may_be_nothing(flag: str) -> None:
    values = {"nodes": 2, "gpus_per_node": 2, "node_gbps": 100.0, "latency_us": 5.0, "links": 1}
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}"):
        gpu_cluster(accelerator("V100"), **{**values, flag: 0})  # type: ignore[arg-type]


def test_what_bounds_a_ring() -> None:
    made = Cluster(2, 2, Link(3e-6, 5e-9), Link(1e-5, 1e-9), oversubscription=4)
    assert made.slowest == Link(1e-5, 5e-9)
    assert made.with_nodes(1).slowest == made.intra
    assert Cluster(2, 1, Link(1, 1), Link(1e-5, 1e-9), oversubscription=4).slowest.beta_s == 4e-9
    with pytest.raises(ConfigError, match="oversubscription"):
        Cluster(2, 2, Link(0, 0), Link(0, 0), oversubscription=0.5)
