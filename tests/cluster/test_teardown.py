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

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.emulated import LiveClusters
from benchmarks.cluster.network import Namespace
from cluster.traces import PROGRAMS, RANK_ENV, assert_end, living, traces

pytestmark = pytest.mark.usefixtures("_usual_signals")
needs_machine = pytest.mark.usefixtures("_machine")


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], list[str], list[int]]]:
    """A process with a cluster, the names of its namespaces, and the processes in them."""
    command = [sys.executable, str(PROGRAMS / "owner_program.py")]
    env = os.environ | RANK_ENV
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        try:
            names, pids = json.loads(process.stdout.readline())
            yield process, names, pids
        finally:
            process.kill()
            process.wait()
            EmulatedCluster.sweep()


@needs_machine
def test_an_exception_in_the_context() -> None:
    cluster, pids = EmulatedCluster(2), []

    def work_and_fail() -> None:
        cluster.start(0, ["sleep", "600"])
        job = cluster.start(1, ["sh", "-c", "setsid sleep 600 & sleep 600"])
        host = Namespace(cluster.namespaces[1])
        job.wait_until(lambda: len(host.processes()) == 3, 200)
        pids.extend(host.processes())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cluster:
        work_and_fail()
    assert not traces(cluster.namespaces)
    assert_end(pids)


@needs_machine
def test_a_failure_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmulatedCluster(2, rate="200mbit")

    def fail(rate: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cluster._links[1], "shape", fail)
    with pytest.raises(ZeroDivisionError), cluster:
        pass
    assert not traces(cluster.namespaces)


@needs_machine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_tears_down_first(number: signal.Signals) -> None:
    with owner() as (process, names, pids):
        assert len(pids) == 6
        process.send_signal(number)
        # The signal then ends the owner as it would have without a cluster.
        assert process.wait(200) == -number
        assert not traces(names)
        assert_end(pids)


@needs_machine
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


class Fake:
    """A cluster that counts how often it is closed."""

    def __init__(self, live: LiveClusters) -> None:
        self.closed, self._live = 0, live
        live.add(self)

    def close(self) -> None:
        self.closed += 1
        self._live.discard(self)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_closes_all_and_goes_on() -> None:
    live = LiveClusters()
    one, other = Fake(live), Fake(live)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert (one.closed, other.closed) == (1, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_waits_until_namespaces_are_made() -> None:
    live = LiveClusters()
    cluster, seen = Fake(live), []

    def make() -> None:
        with live:
            interrupt()
            interrupt()
            seen.append(cluster.closed)

    with pytest.raises(KeyboardInterrupt):
        make()
    assert seen == [0]
    assert cluster.closed == 1


def test_handlers_of_others_and_ignored_signals_stay() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cluster = Fake(LiveClusters())
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    assert (heard, cluster.closed) == ([signal.SIGTERM], 0)
    cluster.close()
