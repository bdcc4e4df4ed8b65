from __future__ import annotations

import os
import signal
from types import FrameType

import pytest

from paceline.core.host import SignalContext


def test_the_handler_hears_only_its_signals_and_only_inside() -> None:
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    others = signal.getsignal(signal.SIGTERM)
    with SignalContext([signal.SIGUSR1], hear):
        assert signal.getsignal(signal.SIGTERM) is others
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), SignalContext([signal.SIGINT], lambda number, frame: None):
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before
