from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from paceline.cli.launch_signals import LaunchSignals


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
        monkeypatch.setattr("paceline.cli.launch_signals._DEAF_S", 0.0)
        with pytest.raises(Asked):
            os.kill(os.getpid(), signal.SIGTERM)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LaunchSignals(Asked):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
