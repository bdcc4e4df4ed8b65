"""Trainings on hosts that lose the network: every rank reports why it ends, in time, and none stays."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.network import Namespace
from cli_runs import CliProcess, Done, small, started_ranks, steps
from cluster.traces import PATIENCE_S, traces
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import DataError
from paceline.core.topology import Topology

pytestmark = pytest.mark.usefixtures("_machine")
SHORT = ("--set", "comm.timeout_s=6")
PATIENT = partial(faults.patient_watchdog, 0.7)
ENDLESS = (
    "--epochs", "500", "--set", "run.eval_interval_epochs=500",
    "--set", "checkpoint.interval_epochs=0",
)  # fmt: skip
HYBRID = (
    "--set", "comm.algorithm=hybrid", "--set", "comm.hybrid.sizes=64", "--set", "comm.fusion_mib=0.25",
)  # fmt: skip
PORT = 29500


@contextmanager
def ranks_on(
    hosts: int, ranks: int, folder: Path, arguments: Sequence[str], fault: Any = None
) -> Iterator[tuple[EmulatedCluster, list[CliProcess]]]:
    """A job of the same number of ranks on each host; at the end every process must be gone."""
    with EmulatedCluster(hosts) as cluster:
        same = [arguments] * ranks
        each = [partial(faults.several, PATIENT, fault) if fault else PATIENT] * ranks
        with started_ranks(same, folder, each, PORT, cluster=cluster) as processes:
            yield cluster, processes
            assert not any(Namespace(name).processes() for name in cluster.namespaces)
    assert not traces(cluster.namespaces)


def ended(processes: Sequence[CliProcess]) -> list[Done]:
    """Waits far longer than the time-out, because a machine may be busy. A hang lasts for ever."""
    return [process.wait(PATIENCE_S) for process in processes]


def training(folder: Path, hosts: int, *more: str) -> list[str]:
    size = ("--global-batch-size", str(4 * hosts))
    return small("--output", str(folder / "run"), "-b", "4", *ENDLESS, *size, *more)


def in_training(folder: Path) -> Callable[[], bool]:
    return lambda: len(steps(folder / "run")) > 3


def error_line(done: Done) -> str:
    lines = [line for line in done.err.splitlines() if line.startswith("paceline: error: ")]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    assert done.code == 1
    return lines[0].removeprefix("paceline: error: ")


def test_a_host_that_is_cut_off(tmp_path: Path) -> None:
    with ranks_on(3, 3, tmp_path, training(tmp_path, 3, *SHORT, *HYBRID)) as (cluster, processes):
        processes[0].wait_until(in_training(tmp_path), PATIENCE_S)
        cluster.cut(1)
        lines = [error_line(done) for done in ended(processes)]
    # Those that still reach the store agree on who is missing; the one that does not says so.
    for rank in (0, 2):
        assert ": the exchange of " in lines[rank]
        assert re.search(
            r"rank 1 on \S+ \(10\.213\.0\.2\) gives no sign of life \(last seen", lines[rank]
        )
    assert re.search(r"rank 0's host \S+ \(10\.213\.0\.1\) has not answered for", lines[1])


def test_the_ranks_of_a_host_that_are_killed_are_named_with_it(tmp_path: Path) -> None:
    """Their connections break first. Survivors that close theirs next are not blamed."""
    ring = training(tmp_path, 3, "--set", "comm.algorithm=ring")
    with ranks_on(3, 3, tmp_path, ring) as (_, processes):
        processes[0].wait_until(in_training(tmp_path), PATIENCE_S)
        processes[1].send(signal.SIGKILL)
        found = ended(processes)
    for rank in (0, 2):
        assert re.search(r"rank 1 on \S+ \(10\.213\.0\.2\) gives no sign", error_line(found[rank]))


@pytest.mark.slow
def test_the_host_of_the_store_is_cut_off(tmp_path: Path) -> None:
    with ranks_on(2, 2, tmp_path, training(tmp_path, 2, *SHORT, *HYBRID)) as (cluster, processes):
        processes[0].wait_until(in_training(tmp_path), PATIENCE_S)
        cluster.cut(0)
        lines = [error_line(done) for done in ended(processes)]
    assert "(10.213.0.2) gives no sign of life (last seen" in lines[0]
    assert "(10.213.0.1) has not answered for" in lines[1]


def _fails_when_cut(folder: Path) -> None:
    """Replaces the program by a rank that fails by itself while its host is cut off."""
    settings = CommSettings(timeout_s=600.0, rendezvous_timeout_s=60.0)
    with Group(Topology.from_env(os.environ), settings, torch.device("cpu")) as group:
        group.all_reduce_sum(torch.ones(1))
        (folder / f"there-{group.rank}").touch()
        while not (folder / "cut").exists():
            time.sleep(0.1)
        raise DataError("the shard is gone")


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_gets_out_of_a_store_that_is_lost(tmp_path: Path) -> None:
    with ranks_on(2, 2, tmp_path, [], partial(_fails_when_cut, tmp_path)) as (cluster, processes):
        processes[0].wait_until(lambda: len(list(tmp_path.glob("there-*"))) == 2, PATIENCE_S)
        cluster.cut(1)
        (tmp_path / "cut").touch()
        found = ended(processes)
    assert [done.code for done in found] == [1, 1]
    assert found[1].err.splitlines()[-1].endswith("the shard is gone")
