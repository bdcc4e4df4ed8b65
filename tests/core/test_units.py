"""Bytes, durations and percentages: exact text, and bytes that survive a round trip."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import units
from paceline.core.errors import ConfigError
from paceline.core.units import UNKNOWN, format_bytes, format_duration, format_percent, parse_bytes


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
    with pytest.raises(ConfigError) as info:
        parse_bytes("--bytes", text)
    assert info.value.field == "--bytes"


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
