"""Axes end and are marked at round values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.chart import Axis, multiples, nice_spacing, tick_labels


@pytest.mark.parametrize(
    ("low", "high", "spacing"),
    [(0, 10, 2), (0, 100, 20), (0, 1430, 200), (73, 100, 5), (0, 0.4, 0.1), (0, 3e-5, 5e-6)],
)
def test_nice_spacing(low: float, high: float, spacing: float) -> None:
    assert nice_spacing(low, high) == pytest.approx(spacing)


def test_multiples_carry_no_dust() -> None:
    assert multiples(0, 0.3, 0.1) == [0.0, 0.1, 0.2, 0.3]
    assert multiples(-0.1, 0.1, 0.1) == [-0.1, 0.0, 0.1]
    assert math.copysign(1, multiples(-0.1, 0.1, 0.1)[1]) == 1
    assert multiples(3, 21, 5) == [5, 10, 15, 20]


def test_an_axis_ends_on_ticks() -> None:
    axis = Axis.fit([73.3, 99.7], target_ticks=4)
    assert (axis.low, axis.high) == (70, 100)
    assert axis.ticks == (70, 75, 80, 85, 90, 95, 100)
    assert axis.labels() == ["70", "75", "80", "85", "90", "95", "100"]


def test_a_tight_axis_ends_where_the_values_do() -> None:
    axis = Axis.fit([0.0, 7.3], tight=True)
    assert (axis.low, axis.high) == (0.0, 7.3)
    assert axis.ticks == (0, 2, 4, 6)


def test_an_axis_from_zero() -> None:
    assert Axis.fit([900.0, 1430.0], from_zero=True).low == 0
    assert Axis.fit([-3.0, -1.0], from_zero=True).high == 0


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0, 1e-9, 1e12, 5e-324])
def test_one_value_alone_has_room_around_it(value: float) -> None:
    axis = Axis.fit([value])
    assert axis.low <= value < axis.high
    assert len(axis.ticks) >= 2


def test_no_value_at_all_is_an_axis_too() -> None:
    assert Axis.fit([]).share(0.5) == 0.5


def test_share_runs_from_nought_to_one() -> None:
    axis = Axis.fit([0.0, 10.0])
    assert [axis.share(value) for value in (0, 2.5, 10)] == [0, 0.25, 1]


def test_a_logarithmic_axis() -> None:
    axis = Axis.fit([0.2, 5000.0], log=True)
    assert axis.log
    assert axis.ticks == pytest.approx((0.1, 1, 10, 100, 1000, 10000))
    assert axis.labels() == ["0.1", "1", "10", "100", "1000", "1e4"]
    assert [axis.share(value) for value in (0.1, 10, 10000)] == pytest.approx([0, 0.4, 1])


def test_a_logarithmic_axis_of_many_decades_thins_its_ticks() -> None:
    assert len(Axis.fit([1e-12, 1e12], log=True).ticks) <= 7


def test_a_logarithm_needs_positive_values() -> None:
    assert not Axis.fit([0.0, 10.0], log=True).log
    assert Axis.fit([10.0, 10.0], log=True).share(10.0) == 0


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ((0, 0.5, 1), ["0.0", "0.5", "1.0"]),
        ((0, 500, 1000), ["0", "500", "1,000"]),
        ((0, 20_000, 40_000), ["0", "20k", "40k"]),
        ((0, 2500, 10_000), ["0", "2.5k", "10.0k"]),
        ((0, 1e6, 2e6), ["0", "1M", "2M"]),
        ((0, 5e-5, 1e-4), ["0", "5e-5", "1e-4"]),
        ((0, 0.01, 0.02), ["0.00", "0.01", "0.02"]),
        ((), []),
    ],
)
def test_tick_labels(ticks: tuple[float, ...], labels: list[str]) -> None:
    assert tick_labels(ticks) == labels


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=20))
def test_every_value_lies_on_the_axis(values: list[float]) -> None:
    axis = Axis.fit(values)
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(axis.ticks) <= 13
    assert len(set(axis.labels())) == len(axis.ticks)
