"""Trainings on hosts that fall off the network: every rank says why it ends, in time, and none stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import small, steps
from cluster.traces import PATIENCE_S, PROGRAMS, RANK_ENV, traces
from paceline.bench.cluster import EmulatedCluster
from paceline.bench.cluster.job import Ended
from paceline.bench.cluster.namespace import Namespace

pytestmark = pytest.mark.usefixtures("_machine")
HYBRID = (
    "--set", "comm.algorithm=hybrid", "--set", "comm.eta_kib=64", "--set", "comm.fusion_mib=0.25",
    "--set", "comm.timeout_s=4", "-b", "4", "--epochs", "500", "--set", "run.eval_interval_epochs=500",
    "--set", "checkpoint.interval_epochs=0",
)  # fmt: skip


def train_and_cut(folder: Path, hosts: int, cut: int, *, torchrun: bool = False) -> Ended:
    """Cuts a host off once some steps are done; returns when every process has ended by itself."""
    command = ["-m", "paceline", *small("--output", str(folder / "run"), *HYBRID)]
    command += ["--global-batch-size", str(4 * hosts)]
    with EmulatedCluster(hosts) as cluster:
        start = cluster.torchrun if torchrun else cluster.ranks
        job = start(command, ranks=1, env=RANK_ENV, cwd=folder)
        job.wait_until(lambda: len(steps(folder / "run")) > 3, PATIENCE_S)
        cluster.cut(cut)
        # Far more than the time-out: a machine may be busy. A hang lasts for ever.
        ended = job.wait(90)
        assert not any(Namespace(name).processes() for name in cluster.namespaces)
    assert not traces(cluster.namespaces)
    return ended


def error_line(ended: Ended, rank: int) -> str:
    lines = [line for line in ended.err[rank].splitlines() if line.startswith("paceline: error: ")]
    assert len(lines) == 1, ended.explain()
    assert "Traceback" not in ended.err[rank]
    return lines[0].removeprefix("paceline: error: ")


def test_a_host_that_is_cut_off(tmp_path: Path) -> None:
    ended = train_and_cut(tmp_path, hosts=3, cut=1)
    assert ended.codes == [1, 1, 1], ended.explain()
    # Those that still reach the store agree on who is missing; the one that does not says so.
    for rank in (0, 2):
        line = error_line(ended, rank)
        assert ": the exchange of buffer " in line
        assert "rank 1 gives no sign of life (last seen" in line
    assert "rank 0's host (10.213.0.1) has not answered for" in error_line(ended, 1)


@pytest.mark.slow
def test_the_host_of_the_store_is_cut_off(tmp_path: Path) -> None:
    ended = train_and_cut(tmp_path, hosts=2, cut=0)
    assert ended.codes == [1, 1], ended.explain()
    assert "rank 1 gives no sign of life (last seen" in error_line(ended, 0)
    assert "rank 0's host (10.213.0.1) has not answered for" in error_line(ended, 1)


@pytest.mark.slow  # torchrun's own agent takes its time on a host that is cut off
def test_ranks_end_under_torchrun_too(tmp_path: Path) -> None:
    ended = train_and_cut(tmp_path, hosts=2, cut=1, torchrun=True)
    assert all(ended.codes), ended.explain()
    assert "rank 1 gives no sign of life (last seen" in error_line(ended, 0)
    assert "rank 0's host (10.213.0.1) has not answered for" in error_line(ended, 1)


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_gets_out_of_a_store_that_is_lost(tmp_path: Path) -> None:
    program = [str(PROGRAMS / "leaving_rank.py"), str(tmp_path)]
    with EmulatedCluster(2) as cluster:
        job = cluster.ranks(program, ranks=1, env=RANK_ENV)
        job.wait_until(lambda: len(list(tmp_path.iterdir())) == 2, PATIENCE_S)
        cluster.cut(1)
        (tmp_path / "cut").touch()
        ended = job.wait(40)
    assert ended.codes == [1, 1], ended.explain()
    assert ended.err[1].splitlines()[-1] == "paceline: error: the shard is gone"
