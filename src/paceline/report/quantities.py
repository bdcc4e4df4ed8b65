"""How quantities are written for people, in the terminal and on the page alike.

In: numbers in the units of the run's records, and text from anywhere. Out: short strings of one line.
A quantity that is not known is an en dash.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from paceline.core.untrusted import one_line, printable

UNKNOWN = "–"


def percent(value: float | None, digits: int = 2) -> str:
    """`90.3` → `90.30 %`: accuracies are kept as percentages already."""
    return UNKNOWN if value is None else f"{value:.{digits}f} %"


def count(value: float | None) -> str:
    """`12000` → `12,000`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Images a second: whole where that says enough."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits, never a tail of noughts."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def loss(value: float | None) -> str:
    """Four decimals, so that a column of losses can be compared; a runaway one in short."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`101` → `101 s`, `754` → `12 min 34 s`, `11532` → `3 h 12 min`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.2g} s"
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def moment(seconds_since_1970: float | None) -> str:
    """A point in time, in UTC so that runs from several places compare."""
    if seconds_since_1970 is None:
        return UNKNOWN
    try:
        when = datetime.fromtimestamp(seconds_since_1970, UTC)
    except (OverflowError, OSError, ValueError):  # a year that no calendar has
        return UNKNOWN
    return f"{when:%Y-%m-%d %H:%M} UTC"


def many(amount: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def shown(value: Any) -> str:
    """Any value of a record or a configuration as one line without control characters.

    Names of files come from outside: an escape sequence in one must not reach a terminal.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{shown(key)} = {shown(item)}" for key, item in value.items())
    return one_line(str(value)) or UNKNOWN


def markup(text: str) -> str:
    """`text` for an HTML page: escaped, without control characters."""
    return "\n".join(escape(printable(line)) for line in text.split("\n"))
