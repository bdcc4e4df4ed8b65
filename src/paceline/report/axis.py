"""`Axis`: where a value lies between the ends of a chart, and which values are marked.

In: the values to show. Out: ends, ticks at round values with their labels, and each value's share
of the way from one end to the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MULTIPLES = (1.0, 2.0, 5.0, 10.0)
# Values nearer than this to one another, by their size, or to nought, would need endless labels.
_SAME = 1e-4
_NOUGHT = 1e-100


@dataclass(frozen=True)
class Axis:
    """A scale from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def fit(
        cls,
        values: Iterable[float],
        *,
        tight: bool = False,
        from_zero: bool = False,
        log: bool = False,
        target_ticks: int = 5,
    ) -> Axis:
        """The axis that holds `values`; it ends on ticks, or where the values do if `tight`."""
        known = list(values) or [0.0, 1.0]
        low, high = min(known), max(known)
        if log and low > 0:
            return cls._logarithmic(low, high)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        size = max(abs(low), abs(high))
        if high - low <= size * _SAME or size < _NOUGHT:
            room = 0.1 * size if size >= _NOUGHT else 1.0
            low, high = (low - room if size >= _NOUGHT else low), high + room
        spacing = nice_spacing(low, high, target_ticks)
        if not tight:
            low = math.floor(low / spacing + 1e-9) * spacing
            high = math.ceil(high / spacing - 1e-9) * spacing
        return cls(low, high, tuple(multiples(low, high, spacing)))

    @classmethod
    def _logarithmic(cls, low: float, high: float) -> Axis:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        every = -(-(last - first) // 6)
        ticks = tuple(10.0**power for power in range(first, last + 1, every))
        return cls(10.0**first, 10.0**last, ticks, log=True)

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            span = math.log10(self.high / self.low)
            return math.log10(max(value, self.low) / self.low) / span
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """The ticks as text, all with the same number of decimals."""
        if self.log:
            return [f"{tick:g}" if 1e-3 <= tick < 1e4 else _scientific(tick) for tick in self.ticks]
        return tick_labels(self.ticks)


def nice_spacing(low: float, high: float, target_ticks: int = 5) -> float:
    """The distance of 1, 2 or 5 times a power of ten nearest to `target_ticks` intervals."""
    rough = (high - low) / target_ticks
    scale = 10.0 ** math.floor(math.log10(rough))
    return min((scale * factor for factor in _MULTIPLES), key=lambda s: abs(math.log(s / rough)))


def multiples(low: float, high: float, spacing: float) -> list[float]:
    """Multiples of `spacing` from `low` to `high`, without the dust of repeated addition."""
    decimals = max(0, 2 - math.floor(math.log10(spacing)))
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    # `+ 0.0` turns a negative nought into a plain one.
    return [round(place * spacing, decimals) + 0.0 for place in range(first, last + 1)]


def tick_labels(ticks: Iterable[float]) -> list[str]:
    """`0, 20000, 40000` → `0, 20k, 40k`; `0, 0.5, 1` → `0.0, 0.5, 1.0`."""
    values = list(ticks)
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3 or largest >= 1e12:
        return next(
            labels
            for digits in range(2, 18)
            if len(set(labels := [_scientific(value, digits) for value in values])) == len(values)
        )
    divisor, unit = next(
        ((size, sign) for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if largest >= size),
        (1.0, ""),
    )
    if unit == "k":
        divisor = 1e3
    scaled = [value / divisor for value in values]
    decimals = next(
        (n for n in range(8) if all(abs(round(v, n) - v) < 1e-9 * max(1, abs(v)) for v in scaled)),
        8,
    )
    return ["0" if value == 0 and unit else f"{value:,.{decimals}f}{unit}" for value in scaled]


def _scientific(value: float, digits: int = 2) -> str:
    """`0.00025` → `2.5e-4`."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return "0" if value == 0 else f"{float(mantissa):.{digits + 1}g}e{int(exponent)}"
