"""Bytes, durations, percentages, counts, dates and any value as text, and sizes as people write them."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import units
from paceline.core.units import (
    UNKNOWN,
    count,
    date,
    format_bytes,
    format_duration,
    format_percent,
    loss,
    number,
    parse_bytes,
    plural,
    rate,
    text_of,
)
from refusals import refused


def test_examples() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1 << 10, "1 KiB"), (1536, "1.5 KiB"), (1023 << 10, "1023 KiB"),
        (3 << 20, "3 MiB"), (17_000_000, "16.2 MiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB"),
    ],
)  # fmt: skip
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**43))
def test_bytes_read_back_within_rounding(size: int) -> None:
    text = format_bytes(size)
    if not text.endswith("TiB"):
        assert parse_bytes("--bytes", text) == pytest.approx(size, rel=0.006, abs=1)


def test_sizes_as_people_write_them() -> None:
    texts = ["4096", "64KiB", "64k", "16M", "1 GiB", "1.5kb", "2MB"]
    assert [parse_bytes("--bytes", text) for text in texts] == [
        4096, 65536, 65536, 16 << 20, 1 << 30, 1500, 2_000_000
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "0.1", "4 XiB", "1e9", "9" * 400])
def test_what_is_no_size_is_refused_by_field(text: str) -> None:
    with refused("--bytes"):
        parse_bytes("--bytes", text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, UNKNOWN), (0.0, "0 s"), (2.5e-6, "2.5 µs"), (0.0021, "2.1 ms"), (0.084, "84 ms"),
        (1.5, "1.5 s"), (101.2, "101 s"), (119.7, "2 min 0 s"), (754, "12 min 34 s"),
        (7199.9, "120 min 0 s"), (11532, "3 h 12 min"), (360_000, "100 h 0 min"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_percent() -> None:
    assert [format_percent(90.306), format_percent(90.306, 1), format_percent(None)] == [
        "90.31 %", "90.3 %", UNKNOWN
    ]  # fmt: skip


def test_numbers() -> None:
    assert count(65536) == "65,536"
    assert [rate(value) for value in (12.34, 1430.4, 99.99)] == ["12.3", "1,430", "100.0"]
    assert [number(value) for value in (8.0, 0.0152231, 1e-7)] == ["8", "0.01522", "1e-07"]
    assert [number(value) for value in (999.9, 1024.0, 16384.5)] == ["999.9", "1,024", "16,384"]
    assert [loss(value) for value in (0.5, 2.30258, 123456.0)] == ["0.5000", "2.3026", "1.235e+05"]
    assert [plural(n, "rank") for n in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
    assert [date(value) for value in (1_763_190_000, 1e30)] == ["2025-11-15 07:00 UTC", UNKNOWN]
    assert {write(None) for write in (count, rate, number, loss, date, text_of)} == {UNKNOWN}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"), (0.0005, "0.0005"), (["crop", "flip"], "crop, flip"), ([], "(none)"),
        ("", UNKNOWN), (4 / 3, "1.33333"), (600.0, "600"), ({"a": 1, "b": [True]}, "a = 1, b = true"),
        ("two\nlines\tand  more", "two lines and more"),
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("nul\x00 \ud800 \u202egnp.exe", "nul\ufffd \ufffd \ufffdgnp.exe"), ("Grüße ✓", "Grüße ✓"),
    ],
)  # fmt: skip
def test_any_value_is_one_harmless_line(value: object, text: str) -> None:
    assert text_of(value) == text
