"""Trainings on hosts that fall off the network: every rank says why it ends, in time, and none stays."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cli_runs import small, steps
from cluster.traces import PATIENCE_S, PROGRAMS, RANK_ENV, traces
from paceline.bench.cluster import EmulatedCluster
from paceline.bench.cluster.job import Ended
from paceline.bench.cluster.network import Namespace

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
        assert re.search(r"rank 1 on \S+ \(10\.213\.0\.2\) gives no sign of life \(last seen", line)
    line = error_line(ended, 1)
    assert re.search(r"rank 0's host \S+ \(10\.213\.0\.1\) has not answered for", line)
    # It cannot reach the third host either, so it is this host that is cut off.
    assert re.search(r"this host \S+ \(10\.213\.0\.2\) is cut off the network", line)


@pytest.mark.slow
def test_the_host_of_the_store_is_cut_off(tmp_path: Path) -> None:
    ended = train_and_cut(tmp_path, hosts=2, cut=0)
    assert ended.codes == [1, 1], ended.explain()
    assert "(10.213.0.2) gives no sign of life (last seen" in error_line(ended, 0)
    assert "(10.213.0.1) has not answered for" in error_line(ended, 1)


@pytest.mark.slow
def test_a_host_that_is_cut_off_during_an_evaluation(tmp_path: Path) -> None:
    """No exchange is under way, and only the store knows of ranks 2 and 3. Their host is named as one."""
    program = [str(PROGRAMS / "evaluating_rank.py"), str(tmp_path)]
    program += small("--output", str(tmp_path / "run"), "--set", "comm.timeout_s=4", "-b", "4")
    with EmulatedCluster(2) as cluster:
        job = cluster.ranks(program, ranks=2, env=RANK_ENV, cwd=tmp_path)
        job.wait_until(lambda: len(list(tmp_path.glob("evaluates-*"))) == 4, PATIENCE_S)
        cluster.cut(1)
        ended = job.wait(90)
    assert ended.codes == [1, 1, 1, 1], ended.explain()
    for rank in (0, 1):
        line = error_line(ended, rank)
        assert re.search(
            r"stalled for [\d.]+ s: host \S+ \(10\.213\.0\.2\) with ranks 2 and 3 gives", line
        )
        assert "look into rank 2's log and host, and the network to it" in line
    for rank in (2, 3):
        assert "it or this host has ended or is cut off the network" in error_line(ended, rank)


def test_the_ranks_of_a_host_that_are_killed_are_named_with_it(tmp_path: Path) -> None:
    """Their connections break at once; those that survivors close next do not shift the blame."""
    command = ["-m", "paceline", *small("--output", str(tmp_path / "run"), "--epochs", "500")]
    command += ["--global-batch-size", "12", "--set", "comm.algorithm=ring", "-b", "4"]
    with EmulatedCluster(3) as cluster:
        job = cluster.ranks(command, ranks=1, env=RANK_ENV, cwd=tmp_path)
        job.wait_until(lambda: len(steps(tmp_path / "run")) > 3, PATIENCE_S)
        for pid in Namespace(cluster.namespaces[1]).processes():
            os.kill(pid, signal.SIGKILL)
        ended = job.wait(90)
    assert (ended.codes[0], ended.codes[2]) == (1, 1), ended.explain()
    for rank in (0, 2):
        assert re.search(r"rank 1 on \S+ \(10\.213\.0\.2\) is gone", error_line(ended, rank))


@pytest.mark.slow  # torchrun's own agent takes its time on a host that is cut off
def test_ranks_end_under_torchrun_too(tmp_path: Path) -> None:
    ended = train_and_cut(tmp_path, hosts=2, cut=1, torchrun=True)
    assert all(ended.codes), ended.explain()
    assert "(10.213.0.2) gives no sign of life (last seen" in error_line(ended, 0)
    assert "(10.213.0.1) has not answered for" in error_line(ended, 1)


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
