"""Formats quantities such as bytes, durations, percentages and dates for the terminal and for pages.

An unknown quantity (None) is shown as an en dash.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.untrusted import one_line, printable

UNKNOWN = "–"
_BYTE_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_MAX_NUMBER = 2.0**50


def format_bytes(size: float) -> str:
    """Formats a number of bytes with three significant digits.

    >>> format_bytes(65536), format_bytes(51_300_000), format_bytes(12)
    ('64 KiB', '48.9 MiB', '12 B')
    """
    for unit, scale in _BYTE_UNITS:
        if size >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def parse_bytes(field: str, text: str) -> int:
    """Parses the size in an option or setting `field`.

    K, M and G are powers of 1024, as in nccl-tests; KB, MB and GB are powers of 1000.

    >>> parse_bytes("--min-bytes", "64KiB"), parse_bytes("--min-bytes", "1.5MB")
    (65536, 1500000)
    """
    match = _BYTES.fullmatch(text.strip())
    size = 0
    if match is not None and float(match[1]) < _MAX_NUMBER:
        base = 1000.0 if match[2] and (match[3] or "").lower() == "b" else 1024.0
        size = round(float(match[1]) * base ** _POWERS[match[2].lower()])
    if size < 1:
        raise ConfigError(field, text, "is not a size", "write 4096, 64KiB or 16MiB")
    return size


def format_duration(seconds: float | None) -> str:
    """Formats a number of seconds.

    >>> [format_duration(s) for s in (0.0123, 1.5, 101, 754, 11532)]
    ['12.3 ms', '1.5 s', '101 s', '12 min 34 s', '3 h 12 min']
    """
    if seconds is None:
        return UNKNOWN
    if 0 < seconds < 1e-3:
        return f"{_three_digits(1e6 * seconds)} µs"
    if 0 < seconds < 1:
        return f"{_three_digits(1e3 * seconds)} ms"
    if round(seconds) < 120:
        return f"{_three_digits(seconds)} s"
    if seconds < 7200:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_percent(value: float | None, digits: int = 2) -> str:
    """Formats a value that is already in percent.

    >>> format_percent(90.306), format_percent(100 * 0.31, 0)
    ('90.31 %', '31 %')
    """
    return UNKNOWN if value is None else f"{value:.{digits}f} %"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def count(value: float | None) -> str:
    """Formats a whole number, as in `12,000`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Formats images per second, with one decimal below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def number(value: float | None) -> str:
    """Formats a number with four significant digits, and without decimals from 1,000 on.

    >>> number(0.5), number(16384), number(1e20)
    ('0.5', '16,384', '1e+20')
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if 999.95 <= abs(value) < 1e15 else f"{value:.4g}"


def loss(value: float | None) -> str:
    """Formats a loss with four decimals; a diverged loss with four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def date(seconds_since_1970: float | None) -> str:
    """Formats a time in UTC."""
    if seconds_since_1970 is None:
        return UNKNOWN
    try:
        return f"{datetime.fromtimestamp(seconds_since_1970, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):  # outside of the calendar
        return UNKNOWN


def plural(amount: int, noun: str) -> str:
    """Formats an amount with its noun, as in `1 rank`, `2 ranks` and `2 batches`."""
    ending = "" if amount == 1 else "es" if noun.endswith("ch") else "s"
    return f"{amount:,} {noun}{ending}"


def text_of(value: Any) -> str:
    """Formats any value of a record or a configuration as one line without control characters.

    Records contain untrusted file names, whose escape sequences must not reach a terminal.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(item) for item in value) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{text_of(key)} = {text_of(item)}" for key, item in value.items())
    return one_line(str(value)) or UNKNOWN


def markup(text: str) -> str:
    """Escapes a text for an HTML page and removes control characters."""
    return "\n".join(escape(printable(line)) for line in text.split("\n"))
