"""Clusters end with their process, and half-made ones are never left behind."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.bench.cluster.emulated import LiveClusters

pytestmark = pytest.mark.usefixtures("_usual_signals")


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


def test_a_fork_does_not_end_its_parents_clusters() -> None:
    live = LiveClusters()
    cluster = Fake(live)
    live.forget()  # what the process does after a fork
    live.close_all()
    assert cluster.closed == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
