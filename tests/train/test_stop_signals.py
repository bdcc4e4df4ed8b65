from __future__ import annotations

import os
import signal

import pytest

from paceline.comm.exchange import SIGNALS
from paceline.config import CheckpointSettings
from paceline.train import StopSignals
from paceline.train.stop_signals import (
    STOP_FIELDS,
    agreed_stop,
    interrupted_at_once,
    without_save_requests,
)
from refusals import refused


def test_the_first_signal_counts_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyError), StopSignals():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def test_settings_determine_the_meaning_of_user_signals() -> None:
    with StopSignals.of(CheckpointSettings()) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.received, stop.take_save_request()) == (None, True)
        assert not stop.take_save_request()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.received is signal.SIGUSR2
    for name in ("on_sigusr1", "on_sigusr2"):
        with refused(f"checkpoint.{name}"):
            CheckpointSettings(**{name: "leave"})


def test_all_ranks_obey_the_same_signal() -> None:
    for name, number in STOP_FIELDS.items():
        assert agreed_stop([float(field == name) for field in STOP_FIELDS]) is number
    assert agreed_stop([0.0] * len(STOP_FIELDS)) is None
    assert agreed_stop([2.0, 0.0, 0.0, 0.0, 1.0]) is signal.SIGTERM
    assert set(STOP_FIELDS) <= set(SIGNALS)


def test_an_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_anything_to_save_interrupts_end_and_save_requests_are_ignored() -> None:
    interrupt, user = (signal.getsignal(n) for n in (signal.SIGINT, signal.SIGUSR1))
    with interrupted_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with StopSignals():
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with without_save_requests(CheckpointSettings()):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is interrupt
    assert signal.getsignal(signal.SIGUSR1) is user
