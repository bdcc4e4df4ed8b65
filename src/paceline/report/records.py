"""Records of one metrics file: steps as columns of numbers, all other records as dictionaries.

`RecordLog` collects records in file order. `RecordLog.current` returns the records that are valid
now: a resumed run returns to an earlier step and repeats the steps after it, so their old records
are superseded. Columns need much less memory than dictionaries, and medians over 100,000 steps are
fast.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.events import StepEvent
from paceline.core.untrusted import is_count, is_finite

Record = dict[str, Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# The field of a step record that contains the seconds of input stall by cause.
CAUSES = "input_stall_causes"
# A page shows at most this many declared counts.
_MAX_COUNTS = 8
# The fields of a step record that are kept. An untrusted file may contain any number of other fields.
_COLUMNS = (
    "time",
    *(f.name for f in fields(StepEvent) if f.name not in ("step", "skipped", "fields", CAUSES)),
)
# The kinds of which a step has at most one record.
_ONE_PER_STEP = frozenset({"eval", "checkpoint", "ranks"})
# Larger values cannot be measurements and would overflow the computation of a chart's axis.
_MAX_VALUE = 1e100


def finite(record: Record, name: str) -> float | None:
    """Returns a field as a float, or None if the value is missing, no number, not finite or huge."""
    value = record.get(name)
    if not is_finite(value) or abs(value) > _MAX_VALUE:
        return None
    return float(value) if abs(value) > 1 / _MAX_VALUE else 0.0


def integer(record: Record, name: str) -> int | None:
    """Returns a field rounded to an integer, or None if `finite` would return None."""
    value = finite(record, name)
    return None if value is None else round(value)


def known(values: Floats) -> Floats:
    """Returns the values that are not NaN."""
    return values[~np.isnan(values)]


def middle(values: Floats) -> float | None:
    """Returns the median of the values that are not NaN, or None if there is none."""
    numbers = known(values)
    return float(np.median(numbers)) if len(numbers) else None


def declared_counts(start: Record) -> dict[str, list[str]]:
    """Returns which fields of the step records are histograms, as the start record declares.

    Such a field maps a number, for example a staleness, to the count of events with that number.

    Args:
        start: A record; a record of another kind than "start" declares no field.

    Returns:
        For each field: the title of the table, the heading of the numbers, and the heading of the
        counts.
    """
    declared = start.get("counts")
    if start["event"] != "start" or type(declared) is not dict:
        return {}
    return {
        name: words
        for name, words in list(declared.items())[:_MAX_COUNTS]
        if type(words) is list and len(words) == 3 and all(type(word) is str for word in words)
    }


class _NamedValues:
    """Numbers that step records have by name, such as seconds by cause, stored as columns."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._rows, self._names, self._values = array("q"), array("q"), array("d")

    def append(self, row: int, name: str, value: float) -> None:
        self._rows.append(row)
        self._names.append(self.names.setdefault(name, len(self.names)))
        self._values.append(value)

    def sums(self, rows: Bools) -> dict[str, float]:
        """Returns the sum of each name's values over the rows in the mask; leaves out zeros."""
        row, name = np.array(self._rows, np.int64), np.array(self._names, np.int64)
        selected = row < len(rows)  # further rows were appended after `rows` was made
        selected[selected] = rows[row[selected]]
        values = np.array(self._values)[selected]
        totals = np.bincount(name[selected], values, len(self.names)).tolist()
        return {name: total for name, total in zip(self.names, totals, strict=False) if total > 0}


class RecordLog:
    """The records of one metrics file, appended in file order."""

    def __init__(self) -> None:
        self._length = 0
        self.steps, self.places = array("q"), array("q")
        self.skipped = array("b")
        self.columns: dict[str, array[float]] = {name: array("d") for name in _COLUMNS}
        self.named = {CAUSES: _NamedValues()}
        self._events: list[tuple[int, Record]] = []

    def append(self, record: Record) -> None:
        """Adds a record. The `step` of a step record must be an integer of at most 64 bits."""
        place, self._length = self._length, self._length + 1
        if record["event"] != "step":
            self._events.append((place, record))
            for name in declared_counts(record):
                self.named.setdefault(name, _NamedValues())
            return
        row = len(self.steps)
        self.steps.append(record["step"])
        self.places.append(place)
        self.skipped.append(record.get("skipped") is True)
        for name, column in self.columns.items():
            value = record.get(name)
            column.append(float(value) if is_finite(value) else math.nan)
        for field_name, named in self.named.items():
            values: Record = record.get(field_name) or {}
            for name in values if type(values) is dict else ():
                if field_name == CAUSES:
                    if (seconds := finite(values, name) or 0.0) > 0:
                        named.append(row, name, seconds)
                elif name.isdecimal() and is_count(values[name], most=2**53):
                    named.append(row, name, values[name])

    def current(self) -> Records:
        """Returns the records without superseded ones.

        A start record at step s, such as that of a resume, supersedes all earlier records of later
        steps. Start records are never superseded, because they are the history of the run.
        """
        starts = [(place, r["step"]) for place, r in self._events if r["event"] == "start"]
        start_places = [place for place, _ in starts]
        # limits[n]: the earliest step to which the run returned after the first n starts.
        limits = [math.inf]
        for _, step in reversed(starts):
            limits.append(min(limits[-1], step))
        limits.reverse()
        kept = [
            (place, r)
            for place, r in self._events
            if r["event"] == "start"
            or r.get("step", 0) <= limits[bisect_right(start_places, place)]
        ]
        last = {(r["event"], r.get("step")): place for place, r in kept}
        kept = [
            (place, r)
            for place, r in kept
            if r["event"] not in _ONE_PER_STEP or last[r["event"], r["step"]] == place
        ]
        steps, places = np.array(self.steps, np.int64), np.array(self.places, np.int64)
        rows = np.arange(len(steps))
        if starts:
            limit = np.array(limits)[np.searchsorted(start_places, places, side="right")]
            rows = rows[steps <= limit]
        if np.any(np.diff(steps[rows]) <= 0):
            # Sort by step and keep the last record of each step.
            rows = rows[np.argsort(steps[rows], kind="stable")]
            rows = rows[np.append(np.diff(steps[rows]) > 0, True)]
        return Records(Steps(self, rows), tuple(r for _, r in kept), tuple(p for p, _ in kept))


class Steps:
    """The valid step records of one rank as columns, sorted by step. Callers must not change them."""

    def __init__(self, log: RecordLog, rows: Ints) -> None:
        self._log, self._rows = log, rows
        self._columns: dict[str, Floats] = {}
        self._log_length = len(log.steps)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def number(self) -> Ints:
        """The step number of each record, strictly increasing."""
        return np.array(self._log.steps, np.int64)[self._rows]

    @cached_property
    def place(self) -> Ints:
        """The position of each record among all records of the file."""
        return np.array(self._log.places, np.int64)[self._rows]

    @cached_property
    def skipped(self) -> Bools:
        """True for steps that all ranks skipped."""
        return np.array(self._log.skipped, np.bool_)[self._rows]

    def __getitem__(self, name: str) -> Floats:
        """Returns a column; values for which `finite` returns None are NaN."""
        if name not in self._columns:
            values = np.array(self._log.columns[name])[self._rows]
            size = np.abs(values)
            values[size > _MAX_VALUE] = math.nan
            values[size < 1 / _MAX_VALUE] = 0.0
            self._columns[name] = values
        return self._columns[name]

    def or_zero(self, name: str) -> Floats:
        """Returns a column with zeros instead of NaN."""
        return np.nan_to_num(self[name])

    def known(self, name: str) -> Floats:
        """Returns a column without NaN values."""
        return known(self[name])

    def last(self, name: str) -> float | None:
        """Returns the value of column `name` in the last step, or None if it is unknown."""
        return None if not len(self) or np.isnan(self[name][-1]) else float(self[name][-1])

    def sums(self, field_name: str, selected: Bools | None = None) -> dict[str, float]:
        """Sums a field that maps names to numbers over steps, and returns the sum of each name.

        Args:
            field_name: `CAUSES`, or a field that `declared_counts` returns.
            selected: A mask of the steps to sum over; all steps by default.
        """
        rows = np.zeros(self._log_length, np.bool_)
        rows[self._rows if selected is None else self._rows[selected]] = True
        return self._log.named[field_name].sums(rows)


@dataclass(frozen=True)
class Records:
    """The records of one rank that a resume has not superseded.

    Attributes:
        steps: The step records.
        events: All other records, in file order.
    """

    steps: Steps
    events: tuple[Record, ...]
    _places: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """Builds the valid records from all records of a file."""
        log = RecordLog()
        for record in records:
            log.append(record)
        return log.current()

    @cached_property
    def by_kind(self) -> dict[str, list[Record]]:
        """The events, grouped by kind."""
        groups: dict[str, list[Record]] = {}
        for record in self.events:
            groups.setdefault(record["event"], []).append(record)
        return groups

    def elapsed_s(self) -> float | None:
        """Returns for how many seconds the run was running, or None without a start record.

        This is the time from each start to the last record before the next start, summed over all starts.
        """
        times = np.array([finite(r, "time") for r in self.events], np.float64)
        places = np.append(np.array(self._places, np.int64), self.steps.place)
        times = np.append(times, self.steps["time"])
        order = np.argsort(places)
        order = order[~np.isnan(times[order])]
        places, times = places[order], times[order]
        starts = [
            (place, time)
            for place, record in zip(self._places, self.events, strict=True)
            if record["event"] == "start" and (time := finite(record, "time")) is not None
        ]
        if not starts:
            return None
        next_places = [*(place for place, _ in starts[1:]), places[-1] + 1]
        ends = times[np.searchsorted(places, next_places) - 1]
        return float(np.sum(ends - np.array([time for _, time in starts])))
