"""A host that falls off the network, and ranks that notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.traces import PATIENCE_S, PROGRAMS, RANK_ENV, traces
from paceline.bench.cluster import EmulatedCluster
from paceline.bench.cluster.network import Namespace


@pytest.mark.usefixtures("_machine")
def test_a_cut_link_fails_the_collective_on_every_rank(tmp_path: Path) -> None:
    program = [str(PROGRAMS / "cut_link_rank.py"), str(tmp_path)]
    with EmulatedCluster(2) as cluster:
        job = cluster.ranks(program, ranks=1, env=RANK_ENV)
        job.wait_until(lambda: len(list(tmp_path.iterdir())) == 2, PATIENCE_S)
        cluster.cut(1)
        ended = job.wait(30)
        assert ended.codes == [3, 3], ended.explain()
        for rank, err in enumerate(ended.err):
            line = err.splitlines()[-1]
            assert line.startswith(f"rank {rank}: all-reduce failed: "), err
            assert "timed out" in line.lower(), err
        assert not any(Namespace(name).processes() for name in cluster.namespaces)
    assert not traces(cluster.namespaces)
