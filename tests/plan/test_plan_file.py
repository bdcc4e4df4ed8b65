"""plan.toml: one format for plans, tuned clusters, tables of sizes and profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from paceline.core.errors import ConfigError
from paceline.plan import ClusterFacts, FusionBucket, FusionPlan, ModelFacts, PlanFile, SizeTable
from paceline.plan.cluster import Link
from paceline.plan.plan_file import Expected, LinkFacts, ProbedCluster
from paceline.plan.size_choice import choose_algorithms, table_of
from paceline.plan.size_table import MeasuredSize
from paceline.planner.plan_parts import (
    planned_cluster,
    profile_of,
    required_profile,
)
from plan.made import made_workload
from refusals import refused

SIZES = [("fc.weight", 40), ("fc.bias", 4), ("conv.weight", 27)]
MODEL, CLUSTER = ModelFacts.of(SIZES), ClusterFacts(ranks=16, nodes=4)
PLAN = FusionPlan(
    (
        FusionBucket(("fc.weight", "fc.bias"), "ring", "float16", "hierarchical"),
        FusionBucket(("conv.weight",), "hierarchical"),
    )
)
MEASURED = (
    MeasuredSize(1024, {"native": 4e-3, "hierarchical": 1e-3}),
    MeasuredSize(16384, {"native": 4e-3, "hierarchical": 2e-3}, 0.25),
    MeasuredSize(1 << 20, {"native": 1e-2, "hierarchical": 2e-2}),
)
LINK = LinkFacts(1e-5, 1e-9, 0.1, 2.0)
PROBED = ProbedCluster((2, 2), "gloo", "cpu", LINK, LinkFacts(1e-4, 4e-8, 0.2, 2.0), 0.4)
CHOSEN = tuple(choose_algorithms(MEASURED))
TUNED = PlanFile(
    cluster=PROBED.facts, sizes=table_of(MEASURED, CHOSEN), measured=MEASURED, chosen=CHOSEN,
    probed=PROBED, why=("measured: links", "chosen: hierarchical"),
)  # fmt: skip
EXPECTED = Expected(8, 0.1, 0.05, 0.03, 0.02, 0.1, (0.01, 0.02))
FILES = {
    "plan": PlanFile(PLAN, MODEL, CLUSTER, EXPECTED),
    "tuned": TUNED,
    "sizes": PlanFile(sizes=SizeTable.two_way(64)),
    "profile": PlanFile(workload=made_workload(half=True).to_section()),
    "all": PlanFile(
        PLAN, MODEL, PROBED.facts, EXPECTED, TUNED.sizes, MEASURED, CHOSEN, PROBED,
        made_workload().to_section(), ("why",),
    ),
    "alone": PlanFile(cluster=ClusterFacts(1, 1), probed=ProbedCluster((1,), "nccl", "cuda")),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    FILES[name].write(tmp_path / "plan.toml")
    assert PlanFile.read(tmp_path / "plan.toml") == FILES[name]


def test_the_planner_sees_the_cluster_as_probed() -> None:
    found = planned_cluster(TUNED)
    assert (found.nodes, found.ranks_per_node, found.hidden_cost) == (2, 2, 0.4)
    # Probed with all ranks sending, a link inside a node is as slow as in a real exchange.
    assert found.intra == Link(1e-5, 2e-9)
    assert found.inter == Link(1e-4, 4e-8)
    assert found.probed.algorithms == ("native", "hierarchical")
    assert SizeTable.two_way(64).choose(63) == "hierarchical"


@pytest.mark.parametrize(
    ("name", "part", "field"),
    [
        ("tuned", lambda file: file.plan, "comm.plan"),
        ("profile", lambda file: file.table, "comm.hybrid.sizes"),
        ("sizes", required_profile, "--profile"), ("plan", planned_cluster, "--cluster"),
        ("alone", planned_cluster, "cluster.ranks"),
    ],
)  # fmt: skip
def test_a_part_that_is_missing_is_named(
    name: str, part: Callable[[PlanFile], object], field: str
) -> None:
    with refused(field) as caught:
        part(FILES[name])
    assert caught.value.remedy


def test_another_model_and_another_cluster_are_refused_by_their_facts() -> None:
    file, other = FILES["plan"], ModelFacts.of(SIZES[:2])
    file.check(ModelFacts.of(reversed(SIZES)), CLUSTER, "p.toml")
    assert ModelFacts.of([*SIZES[:2], ("conv.weight", 28)]) != MODEL
    assert ModelFacts.of([*SIZES[:2], ("conv1.weight", 27)]) != MODEL
    with pytest.raises(ConfigError) as caught:
        file.check(other, CLUSTER, "p.toml")
    assert str(caught.value) == (
        f"comm.plan = 'p.toml': is for a model with 3 tensors of 71 elements ({MODEL.digest}), but this "
        f"model has 2 tensors of 44 elements ({other.digest}); make a plan for this model, or leave "
        "comm.plan out"
    )
    with pytest.raises(
        ConfigError, match="a cluster with ranks = 16, nodes = 4, but this cluster has"
    ):
        file.check(MODEL, ClusterFacts(8, 4), "p.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("buffer = 3", "not a plan with buckets"),
        ("[[buffer]]\ntensors = 'a'\nalgorithm = 'ring'\nwire = 'auto'", "not a plan with buckets"),
        ("[[buffer]]\ntensors = ['a']\nalgorithm = 'ring'\nwire = 'auto'", "no section [model]"),
        ("[[buffer", "is not TOML"),
        ("[bufer]", "did you mean 'buffer'"),
        ("[cluster]\nranks = 'many'\nnodes = 2", "ranks"),
        ("[workload]\nmodel = 'x'", "not a profile"),
        ("measured = 3", "measured"),
    ],
)
def test_what_is_no_plan_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with refused("comm.plan") as caught:
        profile_of(PlanFile.read(tmp_path / "p.toml"))
    assert words in str(caught.value)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"comm.hybrid.sizes = .*cannot be read \(No such file"):
        SizeTable.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be written"):
        TUNED.write(tmp_path / "none" / "p.toml")


def changed(path: Path, name: str, *keys: Any, value: Any) -> Path:
    tables = FILES[name].to_tables()
    inner = tables
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ranks_per_node", value) for value in ([2, 3], [], [0, 0], [float("inf")], [10**18],
                                                  [True], "8")),
        ("hidden_cost", -0.1), ("hidden_cost", "much"), ("intra", 3), ("intra", {"alpha_s": 1.0}),
        *(("intra", {"alpha_s": alpha, "beta_s_per_byte": 1e-9}) for alpha in (-1.0, float("nan"))),
        ("intra", {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9, "contention": [1]}),
    ],
)  # fmt: skip
def test_clusters_that_cannot_be(tmp_path: Path, key: str, value: object) -> None:
    path = changed(tmp_path / "c.toml", "tuned", "cluster", key, value=value)
    with pytest.raises(ConfigError):
        planned_cluster(PlanFile.read(path, "--cluster"))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, "1", [1.0], True])
def test_medians_that_cannot_be(tmp_path: Path, seconds: object) -> None:
    keys = ("measured", 0, "median_s", "native")
    with pytest.raises(ConfigError, match="measured"):
        PlanFile.read(changed(tmp_path / "c.toml", "tuned", *keys, value=seconds))
    with pytest.raises(ConfigError, match="measured"):
        PlanFile.read(changed(tmp_path / "c.toml", "tuned", "measured", 0, "bytes", value=seconds))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("half", "x"), ("half", float("nan")), ("half", [1, 2]), ("half", "x" * 3000), ("name", ["a"]),
        ("name", "t1"), ("elements", 2**63), ("elements", 2**62), ("elements", 1.5), ("elements", -1),
        ("ready", float("nan")), ("ready", True),
    ],
)  # fmt: skip
def test_gradients_that_cannot_be(tmp_path: Path, field: str, value: object) -> None:
    keys = ("workload", "gradients", 0, field)
    with pytest.raises(ConfigError, match="gradients") as caught:
        profile_of(
            PlanFile.read(changed(tmp_path / "w.toml", "profile", *keys, value=value), "--profile")
        )
    assert len(str(caught.value)) < 700
