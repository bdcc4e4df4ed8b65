from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.overlap import StepTimes, exchanges, exposed_s
from paceline.plan.simulator import Jitter, Options, simulate
from plan.made import made_cluster, made_workload

Seconds = st.floats(0, 1)


@st.composite
def step_times(draw: st.DrawFn) -> StepTimes:
    backward = draw(st.floats(1e-3, 1))
    count = draw(st.integers(0, 6))
    ready = sorted(draw(st.floats(0, backward)) for _ in range(count))
    return StepTimes(
        input_s=draw(Seconds), copy_s=draw(Seconds), forward_s=draw(Seconds), backward_s=backward,
        update_s=draw(Seconds), ready_s=tuple(ready),
        cost_s=tuple(draw(Seconds) for _ in range(count)), hidden_cost=draw(Seconds),
    )  # fmt: skip


def test_an_exchange_waits_for_its_buffer_and_for_the_channel() -> None:
    made = exchanges([1.0, 2.0, 5.0], [2.0, 1.0, 1.0])
    assert [(m.start_s, m.end_s) for m in made] == [(1, 3), (3, 4), (5, 6)]
    assert exposed_s([1.0, 2.0, 5.0], [2.0, 1.0, 1.0], 5.0) == 1
    assert exposed_s([], [], 5.0) == 0


@given(step_times())
def test_the_simulator_repeats_the_three_closed_forms(times: StepTimes) -> None:
    serial = simulate(times, options=Options(overlap=False, prefetch=0))
    prefetched = simulate(times, options=Options(overlap=False))
    overlapped = simulate(times, options=Options(layers=7))
    assert serial.settled_s == pytest.approx(times.serial(), rel=1e-9, abs=1e-12)
    assert prefetched.settled_s == pytest.approx(times.prefetched(), rel=1e-9, abs=1e-12)
    assert overlapped.settled_s == pytest.approx(times.overlapped(), rel=1e-9, abs=1e-12)
    exposed = exposed_s(times.ready_s, times.cost_s, times.backward_s)
    assert overlapped.exposed_s[-1] == pytest.approx(exposed, abs=1e-9)


def test_what_backward_hides_may_slow_it() -> None:
    """Of 0.3 s of exchanges 0.1 are exposed: 0.2 are hidden, and cost half as much."""
    times = StepTimes(0.0, 0.0, 0.1, 0.4, 0.05, (0.2,), (0.3,), hidden_cost=0.5)
    assert times.slowed_s() == pytest.approx(0.1)
    assert times.overlapped() == pytest.approx(0.1 + 0.4 + 0.05 + 0.1 + 0.1)
    nothing_is_hidden = replace(times, ready_s=(0.4,))
    assert nothing_is_hidden.slowed_s() == pytest.approx(0, abs=1e-12)
    assert replace(times, hidden_cost=0.0).slowed_s() == 0


def test_more_ranks_wait_for_a_slower_one() -> None:
    times = StepTimes(0.0, 0.0, 0.1, 0.2, 0.0, (0.2,), (0.05,))
    jitter = Jitter(ranks=0.02, steps=0.01)
    steps = [simulate(times, n, jitter, Options(iterations=30)).settled_s for n in (1, 64, 4096)]
    assert 0.3 < steps[1] < steps[2] < 0.42


def test_the_expected_slowest_is_what_the_simulator_finds() -> None:
    from paceline.plan.straggler import slowest_of

    times = StepTimes(0.0, 0.0, 0.1, 0.2, 0.0, (0.2,), (0.0,))
    found = [
        simulate(times, 256, Jitter(ranks=0.03), Options(iterations=1, seed=s)).step_s[0]
        for s in range(60)
    ]
    assert sum(found) / len(found) / 0.3 == pytest.approx(slowest_of(256, 0.03), rel=0.005)


def test_input_that_is_too_slow_stalls() -> None:
    times = StepTimes(0.5, 0.1, 0.1, 0.2, 0.0)
    found = simulate(times)
    assert found.settled_s == pytest.approx(0.6)
    assert found.stall_s[-1] == pytest.approx(0.3)
    # A deeper queue helps against uneven input, not against slow input.
    assert simulate(times, options=Options(prefetch=4, iterations=60)).settled_s == pytest.approx(
        0.6, rel=0.01
    )


def test_the_slowest_rank_is_named() -> None:
    times = StepTimes(0.0, 0.0, 0.1, 0.2, 0.0, (0.2,), (0.05,))
    found = simulate(times, 100, Jitter(ranks=0.05), Options(iterations=5))
    assert len(set(found.slowest.tolist())) == 1


def test_sixty_five_thousand_ranks() -> None:
    from paceline.plan.choose_plan import threshold_plan
    from paceline.plan.prediction import step_times as of_plan

    work, cluster = made_workload(), made_cluster(8192, 8)
    times, _ = of_plan(work, cluster, threshold_plan(work, cluster, 0), 32)
    found = simulate(times, cluster.ranks, Jitter(0.02, 0.01, 0.1), Options(iterations=10))
    assert found.settled_s > times.forward_s + times.backward_s
