"""`paceline bench input`: which rows, measured in turn, and what they say side by side.

In: our rows and the peers'. Out: images/s of each in every round and ratios of their medians. Each round
measures every row once, beginning with another one each time, so that whatever else the machine does
hits all of them alike; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.input_row import InputRow, RowSample, measure_row

Tell = Callable[[str], None]


@dataclass(frozen=True)
class RowRates:
    """`rates` has a value a round. `described` and `remarks` say what ran, each text once."""

    row: InputRow
    rates: tuple[float, ...]
    described: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def to_dict(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.name, "kind": row.kind, "workers": row.workers,
            "directory": row.settings.dir, "images_per_s": self.median,
            "lowest": min(self.rates), "highest": max(self.rates), "rounds": list(self.rates),
            "input": "; ".join(self.described), "remarks": list(self.remarks),
        }  # fmt: skip


def measure_rows(
    rows: Sequence[InputRow],
    *,
    rounds: int,
    seconds: float,
    tell: Tell,
    measure: Callable[[InputRow, float], RowSample] = measure_row,
) -> list[RowRates]:
    """All rounds of all rows, interleaved; `tell` hears of each sample."""
    samples: list[list[RowSample]] = [[] for _ in rows]
    for turn in range(rounds):
        for step in range(len(rows)):
            place = (turn + step) % len(rows)
            sample = measure(rows[place], seconds)
            samples[place].append(sample)
            tell(f"round {turn + 1}: {rows[place].name}: {sample.rate:,.0f} images/s")
    return [_together(row, found) for row, found in zip(rows, samples, strict=True)]


def _together(row: InputRow, samples: Sequence[RowSample]) -> RowRates:
    described = dict.fromkeys(sample.described for sample in samples if sample.described)
    remarks = dict.fromkeys(sample.remark for sample in samples if sample.remark)
    rates = tuple(sample.rate for sample in samples)
    return RowRates(row, rates, tuple(described), tuple(remarks))


def ratios(results: Sequence[RowRates]) -> dict[str, float]:
    """Our fastest row over the fastest of each kind of peer, by the median of the rounds' ratios."""
    fastest: dict[str, RowRates] = {}
    for result in results:
        best = fastest.get(result.row.kind)
        if best is None or result.median > best.median:
            fastest[result.row.kind] = result
    ours = fastest.pop("ours", None)
    if ours is None:
        return {}
    return {
        f"{ours.row.name} / {peer.row.name}": statistics.median(
            mine / theirs for mine, theirs in zip(ours.rates, peer.rates, strict=True)
        )
        for peer in fastest.values()
    }
