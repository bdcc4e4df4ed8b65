from __future__ import annotations

import os
import signal

import pytest

from paceline.train.stop_signals import StopSignals, interrupted_at_once


def test_the_first_signal_is_noted_and_later_ones_break_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


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
