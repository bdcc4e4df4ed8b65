"""Times of repeated work: what is counted, and what is not."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.bench.timing import Times, device_times, steady_times


def test_median_and_spread_ignore_a_straggler() -> None:
    times = Times(tuple([1.0] * 19 + [50.0]))
    assert times.median == 1.0
    assert times.spread == (1.0, 1.0)


def test_the_warm_up_is_not_timed() -> None:
    calls: list[float] = []

    def work() -> None:
        calls.append(time.perf_counter())
        if len(calls) <= 2:
            time.sleep(0.2)

    times = device_times(work, torch.device("cpu"), repeats=3, warm_up=2)
    assert len(calls) == 5
    assert len(times.seconds) == 3
    assert max(times.seconds) < 0.2


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_steps_under_way_never_exceed_the_lag_and_all_are_waited_for(lag: int) -> None:
    under_way, most, order = 0, 0, []

    def launch(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        order.append(number)

    def wait() -> None:
        nonlocal under_way
        assert under_way > 0
        under_way -= 1

    turns: list[int] = []
    times = steady_times(
        launch, wait, lag=lag, repeats=5, warm_up=4, ready=lambda: turns.append(under_way)
    )
    assert len(times.seconds) == 5
    assert most == lag + 1
    assert under_way == 0
    assert turns == [0]  # nothing is under way while another row measures
    assert order == list(range(len(order)))
