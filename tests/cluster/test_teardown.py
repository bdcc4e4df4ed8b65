"""However its owner ends, a cluster leaves no namespace, no process and no folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.traces import PROGRAMS, RANK_ENV, assert_end, living, traces
from paceline.bench.cluster import EmulatedCluster
from paceline.bench.cluster.network import Namespace

pytestmark = pytest.mark.usefixtures("_machine", "_usual_signals")


@contextlib.contextmanager
def owner(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str], list[int]]]:
    """A process with a cluster, the names of its namespaces, and the processes in them."""
    command = [sys.executable, str(PROGRAMS / "owner_program.py"), *arguments]
    env = os.environ | RANK_ENV
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        try:
            assert process.stdout is not None
            names, pids = json.loads(process.stdout.readline())
            yield process, names, pids
        finally:
            process.kill()
            process.wait()
            EmulatedCluster.sweep()


def test_an_exception_in_the_context() -> None:
    cluster, pids = EmulatedCluster(2), []

    def work_and_fail() -> None:
        cluster.start(0, ["sleep", "600"])
        job = cluster.start(1, ["sh", "-c", "setsid sleep 600 & sleep 600"])
        host = Namespace(cluster.namespaces[1])
        job.wait_until(lambda: len(host.processes()) == 3, 20)
        pids.extend(host.processes())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cluster:
        work_and_fail()
    assert not traces(cluster.namespaces)
    assert_end(pids)


def test_a_failure_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmulatedCluster(2, rate="200mbit")

    def fail(rate: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cluster._links[1], "shape", fail)
    with pytest.raises(ZeroDivisionError), cluster:
        pass
    assert not traces(cluster.namespaces)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_owner_tears_down_first(number: signal.Signals) -> None:
    with owner() as (process, names, pids):
        assert len(pids) == 6
        process.send_signal(number)
        # The signal then ends the owner as it would have without a cluster.
        assert process.wait(30) == -number
        assert not traces(names)
        assert_end(pids)


def test_an_exit_inside_the_context() -> None:
    with owner("leave") as (process, names, pids):
        assert process.wait(30) == 5
        assert not traces(names)
        assert_end(pids)


def test_a_killed_owner_leaves_all_to_the_sweep() -> None:
    with EmulatedCluster(1) as ours, owner() as (process, names, pids):
        # The owner is alive, and so is what it has.
        assert EmulatedCluster.sweep() == []
        process.kill()
        process.wait()
        assert living(pids) == pids
        assert EmulatedCluster.sweep() == sorted(names)
        assert not traces(names)
        assert_end(pids)
        assert set(traces(ours.namespaces)) >= set(ours.namespaces)


def test_a_fork_leaves_its_parents_cluster_alone() -> None:
    with EmulatedCluster(1) as cluster:
        child = os.fork()
        if child == 0:
            cluster.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert set(traces(cluster.namespaces)) >= set(cluster.namespaces)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    one, other = EmulatedCluster(1), EmulatedCluster(1)
    one.__enter__()
    other.__enter__()
    assert signal.getsignal(signal.SIGTERM) not in before
    one.close()
    other.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_ctrl_c_reaches_the_body_once_all_is_gone() -> None:
    cluster = EmulatedCluster(1)

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        cluster.start(0, ["sleep", "600"]).wait(600)

    with pytest.raises(KeyboardInterrupt), cluster:
        work()
    assert not traces(cluster.namespaces)
