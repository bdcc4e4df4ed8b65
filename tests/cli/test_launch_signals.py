from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.cli.launch import LaunchSignals


class Asked(Exception):
    """Stands in for torch's SignalException, and takes what that takes."""

    def __init__(self, text: str, sigval: signal.Signals) -> None:
        super().__init__(text)
        self.sigval = sigval


@pytest.fixture(autouse=True)
def _without_nohup() -> Iterator[None]:
    """The tests themselves may run under nohup, whose will is respected."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_told_as_sigterm_and_the_next_ones_are_not(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with LaunchSignals(Asked) as signals:
        with pytest.raises(Asked) as caught:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is number
        assert caught.value.sigval is signal.SIGTERM
    assert signal.getsignal(number) is before


def test_a_signal_that_went_astray_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with LaunchSignals(Asked):
        with pytest.raises(Asked):
            os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr("paceline.cli.launch._DEAF_S", 0.0)
        with pytest.raises(Asked):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_request_to_save_goes_on_to_children_that_are_ready_for_it() -> None:
    ready = "import signal; signal.signal(10, lambda *_: print('asked', flush=True)); "
    waits = "print('up', flush=True); signal.pause(); "
    starting = "import time; print('up', flush=True); time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for code in (ready + waits, starting)
    ]
    try:
        with LaunchSignals(Asked, forwarded=[signal.SIGUSR1]) as signals:
            assert [child.stdout and child.stdout.readline() for child in children] == ["up\n"] * 2
            os.kill(os.getpid(), signal.SIGUSR1)
            assert children[0].communicate(timeout=60)[0] == "asked\n"
            assert children[1].poll() is None, "a child that is still starting was ended"
        assert signals.received is None
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_user_signal_may_mean_stop() -> None:
    with LaunchSignals(Asked, stops=[signal.SIGUSR2]) as signals:
        with pytest.raises(Asked) as caught:
            os.kill(os.getpid(), signal.SIGUSR2)
        assert (signals.received, caught.value.sigval) == (signal.SIGUSR2, signal.SIGTERM)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LaunchSignals(Asked):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
