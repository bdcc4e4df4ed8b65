"""Ranks on several hosts, more on one than on the other, meet and agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import EmulatedCluster
from cli_runs import small, started_ranks, summary
from cluster.traces import PATIENCE_S, RANK_ENV, traces

pytestmark = pytest.mark.usefixtures("_machine")
PER_HOST = [2, 1]
# A rank that says where it is.
PLACE = """
import dataclasses, json, os
from paceline.core.topology import Topology
print(json.dumps(dataclasses.asdict(Topology.from_env(os.environ))))
"""


def test_ranks_under_torchrun_know_their_places(tmp_path: Path) -> None:
    with EmulatedCluster(2) as cluster:
        job = cluster.torchrun([sys.executable, "-c", PLACE], PER_HOST, env=RANK_ENV, cwd=tmp_path)
        ended = job.wait(PATIENCE_S)
    assert ended.ok, ended.explain()
    assert not traces(cluster.namespaces)
    found = [json.loads(text) for text in ended.out]
    assert [place["rank"] for place in found] == [0, 1, 2]
    assert [place["node_rank"] for place in found] == [0, 0, 1]
    assert [place["local_rank"] for place in found] == [0, 1, 0]
    assert [place["local_world_size"] for place in found] == [2, 2, 1]
    common = {(place["world_size"], place["master_addr"], place["launcher"]) for place in found}
    assert common == {(3, "10.213.0.1", "torchrun")}


def test_a_training_on_hosts_of_different_sizes_ends_with_equal_weights(tmp_path: Path) -> None:
    """The run itself compares the ranks' weights and fails if they differ."""
    arguments = small("--output", "run", "--epochs", "1", "--global-batch-size", "12", "-b", "4")
    with (
        EmulatedCluster(2, rate="200mbit") as cluster,
        started_ranks([arguments] * 3, tmp_path, cluster=cluster, per_host=PER_HOST) as ranks,
    ):
        for rank in ranks:
            done = rank.wait(PATIENCE_S)
            assert done.code == 0, done.err
    ended_with = summary(tmp_path / "run")
    assert ended_with["world_size"] == 3
    assert len(ended_with["weights_sha256"]) == 64
