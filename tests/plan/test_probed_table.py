from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from paceline.core.errors import ConfigError
from paceline.plan.choose_plan import best_plan
from paceline.plan.cluster_file import read_cluster
from paceline.plan.collective_cost import all_reduce_s
from plan.made import made_workload

LINK = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-8, "residual": 0.1, "contention": 1.0}
MEASURED = [
    {"bytes": 1024, "chosen": "tree", "median_s": {"native": 0.01, "tree": 0.001, "ring": 0.002}},
    {"bytes": 2**20, "chosen": "native", "median_s": {"native": 0.05, "tree": 0.4}},
]


def write(path: Path, measured: object = MEASURED) -> Path:
    cluster = {"ranks": 4, "nodes": 2, "ranks_per_node": [2, 2], "intra": LINK, "inter": LINK}
    path.write_text(tomli_w.dumps({"cluster": cluster, "measured": measured}))
    return path


def test_measured_sizes_come_back_and_others_lie_between(tmp_path: Path) -> None:
    place = read_cluster(write(tmp_path / "t.toml"))
    assert place.probed is not None
    assert place.probed.algorithms == ("native", "tree")
    found = all_reduce_s("tree", place, [0, 1, 1024, 2**15, 2**20, 2**22])
    assert found[[0, 1, 2, 4]].tolist() == pytest.approx([0, 0.001, 0.001, 0.4])
    assert found[3] == pytest.approx(0.02)
    assert found[5] == pytest.approx(1.6)


def test_the_plan_takes_what_was_fastest(tmp_path: Path) -> None:
    place = read_cluster(write(tmp_path / "t.toml"))
    assert place.probed is not None
    for elements, name in ((100, "tree"), (500_000, "native")):
        work = made_workload((elements,))
        assert best_plan(work, place, 1, place.probed.algorithms).buffers[0].algorithm == name


def test_formulas_measured_are_formulas_elsewhere(tmp_path: Path) -> None:
    """Medians that are the formulas' own must follow them to other nodes and links."""
    sizes = [1024 * 4**n for n in range(8)]
    bare = replace(read_cluster(write(tmp_path / "t.toml")), probed=None)
    names = ("ring", "hierarchical", "torus2d", "tree")
    rows = [
        {"bytes": size, "median_s": {n: float(all_reduce_s(n, bare, size)) for n in names}}
        for size in sizes
    ]
    probed = read_cluster(write(tmp_path / "t.toml", rows))
    for nodes in (1, 2, 16, 1024):
        for name in names:
            wanted = all_reduce_s(name, bare.with_nodes(nodes), sizes)
            assert all_reduce_s(name, probed.with_nodes(nodes), sizes) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "measured", [[{"bytes": 3}], [{"bytes": "x", "median_s": {"tree": 1}}],
                 [{"bytes": 1, "median_s": {"tree": 0.0}}, {"bytes": 2, "median_s": {"tree": 1.0}}]]
)  # fmt: skip
def test_files_that_cannot_be(tmp_path: Path, measured: object) -> None:
    with pytest.raises(ConfigError):
        read_cluster(write(tmp_path / "t.toml", measured))
