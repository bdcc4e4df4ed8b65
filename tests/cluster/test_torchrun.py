"""Ranks on several hosts meet under the real torchrun and agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import small, summary
from cluster.traces import PATIENCE_S, PROGRAMS, RANK_ENV, traces
from paceline.bench.cluster import EmulatedCluster

pytestmark = pytest.mark.usefixtures("_machine")


def say(ranks: list[int]) -> list[dict[str, Any]]:
    """What the ranks of a sum over all of them say."""
    with EmulatedCluster(len(ranks), rate="200mbit") as cluster:
        job = cluster.torchrun([str(PROGRAMS / "all_reduce_rank.py")], ranks, env=RANK_ENV)
        ended = job.wait(PATIENCE_S)
    assert ended.ok, ended.explain()
    assert not traces(cluster.namespaces)
    return [json.loads(text) for text in ended.out]


@pytest.mark.parametrize("ranks", [[2, 2], [2, 1]], ids=["even", "ragged"])
def test_an_all_reduce_crosses_the_hosts(ranks: list[int]) -> None:
    said, size = say(ranks), sum(ranks)
    hosts = [host for host, count in enumerate(ranks) for _ in range(count)]
    assert [word["rank"] for word in said] == list(range(size))
    assert [word["node_rank"] for word in said] == hosts
    assert [word["local_rank"] for word in said] == [n for count in ranks for n in range(count)]
    assert [word["local_world_size"] for word in said] == [ranks[host] for host in hosts]
    assert {(word["world_size"], word["launcher"]) for word in said} == {(size, "torchrun")}
    assert {word["master_addr"] for word in said} == {"10.213.0.1"}
    ordinals, offsets = 100_002 * 100_003 / 2, 1000 * sum(range(size)) * 100_003
    # Each sum is exact in fp32, so ranks that agree have the very number.
    assert {word["sum"] for word in said} == {size * ordinals + offsets}


def test_a_training_ends_with_equal_weights_on_both_hosts(tmp_path: Path) -> None:
    """The run itself compares the ranks' weights and fails where they differ."""
    command = ["-m", "paceline", *small("--output", str(tmp_path / "run"), "--epochs", "1")]
    with EmulatedCluster(2, rate="200mbit") as cluster:
        ended = cluster.torchrun(command, ranks=1, env=RANK_ENV, cwd=tmp_path).wait(PATIENCE_S)
    assert ended.ok, ended.explain()
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["chosen"]["launcher"]) == (2, "torchrun")
    assert len(found["weights_sha256"]) == 64
