"""The file that `paceline tune` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.comm.size_table import SizeTable
from paceline.comm.tuning_choice import MeasuredSize, choose_algorithms, table_of
from paceline.comm.tuning_file import ClusterShape, LinkFacts, TuningFile
from paceline.core.errors import ConfigError

MEASURED = (
    MeasuredSize(1024, {"native": 4e-3, "hierarchical": 1e-3}),
    MeasuredSize(16384, {"native": 4e-3, "hierarchical": 2e-3}),
    MeasuredSize(1 << 20, {"native": 1e-2, "hierarchical": 2e-2}),
)
CLUSTER = ClusterShape(
    3,
    (2, 1),
    "gloo",
    "cpu",
    LinkFacts(1e-5, 1e-9, 0.1, 1.5),
    LinkFacts(1e-4, 4e-8, 0.2, 2.0),
    hidden_cost=0.4,
)


def tuned() -> TuningFile:
    chosen = choose_algorithms(MEASURED)
    return TuningFile(table_of(MEASURED, chosen), MEASURED, tuple(chosen), CLUSTER)


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    tuned().write(path)
    assert TuningFile.read(path) == tuned()


def test_the_table_is_read_as_any_other_and_shows_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    tuned().write(path)
    table = SizeTable.read(path)
    assert table == tuned().table
    assert [table.choose(row.size_bytes) for row in MEASURED] == list(tuned().chosen)
    text = path.read_text()
    assert "{ bytes = 1024, times_native = 4.0 }" in text
    assert "[cluster.inter]" in text
    assert "ranks_per_node" in text


def test_a_cluster_without_links_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    alone = ClusterShape(1, (1,), "nccl", "cuda")
    file = TuningFile(SizeTable.single("native"), MEASURED[2:], ("native",), alone)
    file.write(path)
    assert TuningFile.read(path).cluster == alone
    assert alone.nodes == 1


@pytest.mark.parametrize("rest", ["", "[cluster]\nranks = 2\n", 'measured = 3\ncluster = "x"\n'])
def test_a_table_without_facts_is_told(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "sizes.toml"
    path.write_text(
        rest * (not rest.startswith("["))
        + '[[sizes]]\nalgorithm = "ring"\n'
        + rest * rest.startswith("[")
    )
    assert SizeTable.read(path) == SizeTable.single("ring")
    with pytest.raises(ConfigError, match="has no facts of a cluster.*run paceline tune"):
        TuningFile.read(path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output = .*cannot be written"):
        tuned().write(tmp_path / "none" / "sizes.toml")
