"""Quantities as people read them."""

import pytest

from paceline.report.quantities import (
    UNKNOWN,
    count,
    duration,
    loss,
    many,
    moment,
    number,
    percent,
    rate,
    shown,
)


def test_what_is_not_known_is_a_dash() -> None:
    for write in (percent, count, rate, number, loss, duration, moment, shown):
        assert write(None) == UNKNOWN


def test_percent_count_rate_number_loss() -> None:
    assert percent(90.306) == "90.31 %"
    assert percent(90.306, 1) == "90.3 %"
    assert count(65536) == "65,536"
    assert [rate(value) for value in (12.34, 1430.4, 99.99)] == ["12.3", "1,430", "100.0"]
    assert [number(value) for value in (8.0, 0.0152231, 1e-7)] == ["8", "0.01522", "1e-07"]
    assert [loss(value) for value in (0.5, 2.30258, 123456.0)] == ["0.5000", "2.3026", "1.235e+05"]
    assert [many(n, "rank") for n in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0021, "0.0021 s"),
        (1.5, "1.5 s"),
        (101.2, "101 s"),
        (119.7, "2 min 0 s"),
        (754, "12 min 34 s"),
        (11532, "3 h 12 min"),
        (7199.9, "120 min 0 s"),
        (360_000, "100 h 0 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_moment() -> None:
    assert moment(1_763_190_000) == "2025-11-15 07:00 UTC"
    assert moment(1e30) == UNKNOWN


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (0.0005, "0.0005"),
        (["crop", "flip"], "crop, flip"),
        ([], "(none)"),
        ("", UNKNOWN),
        (4 / 3, "1.33333"),
        (600.0, "600"),
        ({"a": 1, "b": [True]}, "a = 1, b = true"),
        ("two\nlines\tand  more", "two lines and more"),
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("nul\x00 \ud800 \u202egnp.exe", "nul\ufffd \ufffd \ufffdgnp.exe"),
        ("Grüße ✓", "Grüße ✓"),
    ],
)
def test_shown_is_one_harmless_line(value: object, text: str) -> None:
    assert shown(value) == text
    shown(value).encode("utf-8")
