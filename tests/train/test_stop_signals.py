from __future__ import annotations

import os
import signal

import pytest

from paceline.comm.exchange import SIGNALS
from paceline.config import CheckpointSettings
from paceline.core.errors import ConfigError
from paceline.train.stop_signals import (
    STOP_FIELDS,
    StopSignals,
    agreed_stop,
    interrupted_at_once,
    without_save_requests,
)


def test_the_first_signal_is_noted_and_later_ones_break_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_settings_say_what_the_user_signals_mean() -> None:
    with StopSignals.of(CheckpointSettings()) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.received, stop.take_save_request()) == (None, True)
        assert not stop.take_save_request()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.received is signal.SIGUSR2
    for name in ("on_sigusr1", "on_sigusr2"):
        with pytest.raises(ConfigError, match=f"checkpoint.{name}"):
            CheckpointSettings(**{name: "leave"})


def test_all_ranks_obey_the_same_signal() -> None:
    fields = list(STOP_FIELDS)
    for name, number in STOP_FIELDS.items():
        sums = [float(field == name) for field in fields]
        assert agreed_stop(sums) is number
    assert agreed_stop([0.0] * len(fields)) is None
    assert agreed_stop([2.0, 0.0, 0.0, 0.0, 1.0]) is signal.SIGTERM
    assert set(STOP_FIELDS) <= set(SIGNALS)


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_to_save_does_not_end_a_process_that_is_starting() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with without_save_requests(CheckpointSettings()):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is before


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), StopSignals():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before


def test_before_there_is_anything_to_save_an_interrupt_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with StopSignals():
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
