from __future__ import annotations

import time

import pytest
import torch

from paceline.train.input_report import InputWait, _causes


class Clocked:
    """An event of a device, at a known millisecond."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, later: Clocked) -> float:
        return later.ms - self.ms


def test_on_a_cpu_the_wait_itself_is_the_stall() -> None:
    wait = InputWait(torch.device("cpu"))
    for spent in ({"decode": 3.0, "read": 1.0}, {"copy": 1.0}):
        with wait:
            time.sleep(0.02)
        wait.attribute(spent)
    stall = wait.stall()
    assert set(stall) == {"decode", "read", "copy"}
    assert stall["decode"] == pytest.approx(3 * stall["read"])
    assert sum(stall.values()) >= 0.04


def test_a_step_without_a_batch_did_not_wait() -> None:
    assert InputWait(torch.device("cpu")).stall() == {}


def test_a_device_that_was_busy_meanwhile_lost_nothing() -> None:
    """The host waited for 50 ms; the device stood still for 10 of them."""
    stall = _causes(0.050, {"decode": 1.0}, Clocked(100.0), Clocked(110.0))
    assert stall == {"decode": pytest.approx(0.010)}
    assert _causes(0.050, {"decode": 1.0}, Clocked(100.0), Clocked(100.0)) == {}


def test_the_devices_own_work_on_a_batch_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still for 1 ms, then augmented for 8."""
    wait, marks = InputWait(torch.device("cuda")), iter((Clocked(0.0), Clocked(9.0)))
    monkeypatch.setattr("paceline.train.input_report.marked", lambda device: next(marks))
    with wait:
        time.sleep(0.002)
    wait.attribute({"augment": 1.0}, Clocked(1.0))
    assert wait.stall() == {"augment": pytest.approx(0.001)}


def test_what_the_device_waits_longer_than_the_host_is_the_copy() -> None:
    stall = _causes(0.002, {"decode": 1.0}, Clocked(0.0), Clocked(5.0))
    assert stall == {"decode": pytest.approx(0.002), "copy": pytest.approx(0.003)}
