"""Ranks on several hosts meet under the real torchrun and agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import small, summary
from cluster.traces import PATIENCE_S, PROGRAMS, RANK_ENV, traces
from paceline.bench.cluster import EmulatedCluster

pytestmark = pytest.mark.usefixtures("_machine")


def test_a_training_on_hosts_of_different_sizes_ends_with_equal_weights(tmp_path: Path) -> None:
    """The run itself compares the ranks' weights and fails where they differ."""
    arguments = small("--output", "run", "--epochs", "1", "--global-batch-size", "12", "-b", "4")
    command = [str(PROGRAMS / "training_rank.py"), *arguments]
    with EmulatedCluster(2, rate="200mbit") as cluster:
        ended = cluster.torchrun(command, [2, 1], env=RANK_ENV, cwd=tmp_path).wait(PATIENCE_S)
    assert ended.ok, ended.explain()
    assert not traces(cluster.namespaces)
    found = [json.loads(text.splitlines()[0]) for text in ended.out]
    assert [place["rank"] for place in found] == [0, 1, 2]
    assert [place["node_rank"] for place in found] == [0, 0, 1]
    assert [place["local_rank"] for place in found] == [0, 1, 0]
    assert [place["local_world_size"] for place in found] == [2, 2, 1]
    assert {(place["world_size"], place["master_addr"]) for place in found} == {(3, "10.213.0.1")}
    ended_with = summary(tmp_path / "run")
    assert (ended_with["world_size"], ended_with["chosen"]["launcher"]) == (3, "torchrun")
    assert len(ended_with["weights_sha256"]) == 64
