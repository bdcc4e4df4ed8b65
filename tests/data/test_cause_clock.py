from __future__ import annotations

import threading

import pytest

from paceline.data.cause_clock import CauseClock, added, shared_out


def test_a_thread_takes_what_it_spent_itself_and_only_once() -> None:
    clock = CauseClock()
    clock.add("read", 1.0)
    clock.add("decode", 2.0)
    clock.add("read", 0.5)
    found: list[dict[str, float]] = []

    def other() -> None:
        clock.add("augment", 4.0)
        found.append(clock.take())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [{"augment": 4.0}]
    assert clock.take() == {"read": 1.5, "decode": 2.0}
    assert clock.take() == {}


def test_a_wait_is_divided_as_the_work_was() -> None:
    shares = shared_out(0.3, {"read": 1.0, "decode": 2.0, "copy": 0.0})
    assert shares == {"read": pytest.approx(0.1), "decode": pytest.approx(0.2)}
    assert shared_out(0.3, {}) == {"other": 0.3}
    assert shared_out(0.0, {"read": 1.0}) == {}


def test_parts_add_up() -> None:
    assert added({"read": 1.0}, {}, {"read": 2.0, "copy": 3.0}) == {"read": 3.0, "copy": 3.0}
    assert added() == {}
