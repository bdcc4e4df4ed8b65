from __future__ import annotations

import time

import pytest

from paceline.comm.active_clock import ActiveClock


def test_time_in_which_nobody_asked_counts_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how a process that was stopped finds it on waking."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = ActiveClock(longest_s=2.0)
    for _ in range(3):
        now[0] += 0.5
        clock.now_s()
    assert clock.now_s() == 1.5
    now[0] += 60
    assert clock.now_s() == 3.5


def test_it_ticks_beside_a_call_that_blocks() -> None:
    with ActiveClock(longest_s=0.05).ticking() as clock:
        time.sleep(0.5)
        passed_s = clock.now_s()
    assert passed_s > 0.2, "not only the longest that one look may add"
