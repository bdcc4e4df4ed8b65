from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.plan import FusionBuffer, FusionPlan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile

SIZES = [("fc.weight", 40), ("fc.bias", 4), ("conv.weight", 27)]
MODEL, CLUSTER = ModelFacts.of(SIZES), ClusterFacts(ranks=16, nodes=4)
PLAN = FusionPlan(
    (
        FusionBuffer(("fc.weight", "fc.bias"), "ring", "float16", "hierarchical"),
        FusionBuffer(("conv.weight",), "hierarchical"),
    )
)


def test_a_file_survives_and_reads_as_toml(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    PlanFile(PLAN, MODEL, CLUSTER).write(path)
    again = PlanFile.read(path)
    assert again == PlanFile(PLAN, MODEL, CLUSTER)
    assert again.plan.fingerprint == PLAN.fingerprint
    again.check(MODEL, CLUSTER, str(path))
    tables = tomllib.loads(path.read_text())
    assert tables["cluster"] == {"ranks": 16, "nodes": 4}
    assert tables["model"]["elements"] == 71
    assert tables["buffer"][0]["beside"] == "hierarchical"
    assert "beside" not in tables["buffer"][1]


def test_the_order_of_declaration_does_not_matter() -> None:
    assert ModelFacts.of(reversed(SIZES)) == MODEL
    assert ModelFacts.of([*SIZES[:2], ("conv.weight", 28)]) != MODEL
    assert ModelFacts.of([*SIZES[:2], ("conv1.weight", 27)]) != MODEL


def test_another_model_and_another_cluster_are_refused_by_their_facts() -> None:
    file, other = PlanFile(PLAN, MODEL, CLUSTER), ModelFacts.of(SIZES[:2])
    with pytest.raises(ConfigError) as caught:
        file.check(other, CLUSTER, "p.toml")
    assert str(caught.value) == (
        f"comm.plan = 'p.toml': is for a model with 3 tensors of 71 elements ({MODEL.digest}), this "
        f"model has 2 tensors of 44 elements ({other.digest}); make a plan for this model, or leave "
        "comm.plan out"
    )
    with pytest.raises(
        ConfigError, match="a cluster with ranks = 16, nodes = 4, this cluster has ranks = 8"
    ):
        file.check(MODEL, ClusterFacts(8, 4), "p.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("buffer = 3", "not a fusion plan"),
        ("[[buffer]]\ntensors = 'a'\nalgorithm = 'ring'\nwire = 'auto'", "not a fusion plan"),
        ("[[buffer]]\ntensors = [1]\nalgorithm = 'ring'\nwire = 'auto'", "not a fusion plan"),
        ("[[buffer]]\ntensors = ['a']\nalgorithm = 'ring'\nwire = 'auto'", "no section [model]"),
        ("[[buffer", "is not TOML"),
    ],
)
def test_what_is_no_plan_file_is_told_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        PlanFile.read(tmp_path / "p.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_facts_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    PlanFile(PLAN, MODEL, CLUSTER).write(path)
    path.write_text(path.read_text().replace("ranks = 16", "ranks = 'many'"))
    with pytest.raises(ConfigError, match=r"no section \[cluster\] with ranks, nodes"):
        PlanFile.read(path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read .No such file.*; check the path"):
        PlanFile.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be written"):
        PlanFile(PLAN, MODEL, CLUSTER).write(tmp_path / "none" / "p.toml")
