"""Counts, rates, losses, dates and values of any type as text."""

import pytest

from paceline.core.units import UNKNOWN, count, date, loss, number, plural, rate, text_of


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
