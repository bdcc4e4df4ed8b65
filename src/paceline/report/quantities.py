"""Counts, rates, losses and values of any type as short text, for the terminal and the page alike.

Bytes, durations and percentages are in `core.units`. A quantity that is unknown (None) is an en dash.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from paceline.core.units import UNKNOWN
from paceline.core.untrusted import one_line, printable


def count(value: float | None) -> str:
    """`12000` → `12,000`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Images per second; a decimal below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def number(value: float | None) -> str:
    """Four significant digits, without trailing zeros."""
    return UNKNOWN if value is None else f"{value:.4g}"


def loss(value: float | None) -> str:
    """Four decimals, so that a column of losses can be compared; a diverged one in short."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def date(seconds_since_1970: float | None) -> str:
    """In UTC, so that runs from several places compare."""
    if seconds_since_1970 is None:
        return UNKNOWN
    try:
        return f"{datetime.fromtimestamp(seconds_since_1970, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):  # outside of the calendar
        return UNKNOWN


def plural(amount: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def text_of(value: Any) -> str:
    """Any value of a record or a configuration as one line without control characters.

    Records hold file names, which are untrusted: no escape sequence in them may reach a terminal.
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
    """`text` escaped for an HTML page, without control characters."""
    return "\n".join(escape(printable(line)) for line in text.split("\n"))
