"""The records of one file of events: steps as columns, the others as they are.

`RecordLog` takes records in the order of the file, and takes more as the file grows. `current` is what
they amount to now: a resumed run repeats some steps, and the records after the step that it returned to
are superseded and left out. A run has many steps, each with the same fields: as columns of numbers they
take a fraction of the memory, and medians and sums over 100,000 of them a fraction of the time.
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

# The field of a step that holds seconds for each of several causes.
CAUSES = "input_stall_causes"
# More record fields than these count nothing that a page could show.
_MOST_COUNTS = 8
# No other field of a step is kept: a foreign file may have any number of them.
_COLUMNS = (
    "time",
    *(f.name for f in fields(StepEvent) if f.name not in ("step", "skipped", "fields", CAUSES)),
)
# A step has at most one record of these kinds; of the others it may have several.
_ONE_PER_STEP = frozenset({"eval", "checkpoint", "ranks"})
# Larger values measure nothing, and would overflow the arithmetic of an axis.
_MAX_VALUE = 1e100
_NAN = math.nan


def finite(record: Record, name: str) -> float | None:
    """A field as a number; None where it is absent, null (JSON's NaN), huge or of another type."""
    value = record.get(name)
    if type(value) is float and 1 / _MAX_VALUE < abs(value) <= _MAX_VALUE:
        return value  # nearly always
    if not is_finite(value) or abs(value) > _MAX_VALUE:
        return None
    return float(value) if abs(value) > 1 / _MAX_VALUE else 0.0


def integer(record: Record, name: str) -> int | None:
    value = finite(record, name)
    return None if value is None else round(value)


def known(values: Floats) -> Floats:
    """Without those that are not known."""
    return values[~np.isnan(values)]


def middle(values: Floats) -> float | None:
    """The median of the known values; None where there is none."""
    found = known(values)
    return float(np.median(found)) if len(found) else None


def declared_counts(start: Record) -> dict[str, list[str]]:
    """The record fields of steps that count something by number, as a start declares them: title, what is
    numbered, what is counted."""
    found = start.get("counts")
    if start["event"] != "start" or type(found) is not dict:
        return {}
    return {
        name: words
        for name, words in list(found.items())[:_MOST_COUNTS]
        if type(words) is list and len(words) == 3 and all(type(word) is str for word in words)
    }


class _Named:
    """Numbers by row and name, as three columns."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._rows, self._names, self._values = array("q"), array("q"), array("d")

    def append(self, row: int, name: str, value: float) -> None:
        self._rows.append(row)
        self._names.append(self.names.setdefault(name, len(self.names)))
        self._values.append(value)

    def sums(self, rows: Bools) -> dict[str, float]:
        """By name, over the rows that are true; those without any are left out."""
        row, name = np.array(self._rows, np.int64), np.array(self._names, np.int64)
        chosen = row < len(rows)  # the others were appended later
        chosen[chosen] = rows[row[chosen]]
        values = np.array(self._values)[chosen]
        totals = np.bincount(name[chosen], values, len(self.names)).tolist()
        return {name: total for name, total in zip(self.names, totals, strict=False) if total > 0}


class RecordLog:
    """Records of one file, appended in its order."""

    def __init__(self) -> None:
        self._records = 0
        self.steps, self.places = array("q"), array("q")
        self.skipped = array("b")
        self.columns: dict[str, array[float]] = {name: array("d") for name in _COLUMNS}
        self.named = {CAUSES: _Named()}
        self._others: list[tuple[int, Record]] = []

    def append(self, record: Record) -> None:
        """Its step is a whole number that fits 64 bits."""
        place, self._records = self._records, self._records + 1
        if record["event"] != "step":
            self._others.append((place, record))
            for name in declared_counts(record):
                self.named.setdefault(name, _Named())
            return
        row = len(self.steps)
        self.steps.append(record["step"])
        self.places.append(place)
        self.skipped.append(record.get("skipped") is True)
        get = record.get
        for name, column in self.columns.items():
            value = get(name)
            if type(value) is not float:
                value = _NAN if value is None or not is_finite(value) else float(value)
            column.append(value)
        causes = get(CAUSES)
        if type(causes) is dict:
            for name in causes:
                if (seconds := finite(causes, name) or 0.0) > 0:
                    self.named[CAUSES].append(row, name, seconds)
        for field_name, named in self.named.items():
            counts = get(field_name) if field_name != CAUSES else None
            for name, times in counts.items() if type(counts) is dict else ():
                if name.isdecimal() and is_count(times, most=2**53):
                    named.append(row, name, times)

    def current(self) -> Records:
        """Without superseded ones: a start at step s drops the earlier records of steps after s, but
        starts, which are the history of the run."""
        starts = [(place, r["step"]) for place, r in self._others if r["event"] == "start"]
        begun = [place for place, _ in starts]
        # The earliest step to which the run returned after each start; there is none after the last one.
        least, returned = math.inf, [math.inf]
        for _, step in reversed(starts):
            least = min(least, step)
            returned.append(least)
        returned.reverse()
        kept = [
            (place, r)
            for place, r in self._others
            if r["event"] == "start" or r.get("step", 0) <= returned[bisect_right(begun, place)]
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
            limit = np.array(returned)[np.searchsorted(begun, places, side="right")]
            rows = rows[steps <= limit]
        if np.any(np.diff(steps[rows]) <= 0):
            # By step, and of each the last record.
            rows = rows[np.argsort(steps[rows], kind="stable")]
            rows = rows[np.append(np.diff(steps[rows]) > 0, True)]
        return Records(Steps(self, rows), tuple(r for _, r in kept), tuple(p for p, _ in kept))


class Steps:
    """The current records of steps, by step. Not to be changed: columns are computed once."""

    def __init__(self, log: RecordLog, rows: Ints) -> None:
        self._log, self._rows, self._kept = log, rows, dict[str, Floats]()
        self._length = len(log.steps)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def number(self) -> Ints:
        """Which step each record is of; it rises from one to the next."""
        return np.array(self._log.steps, np.int64)[self._rows]

    @cached_property
    def place(self) -> Ints:
        """Where each record is among all records of the file."""
        return np.array(self._log.places, np.int64)[self._rows]

    @cached_property
    def skipped(self) -> Bools:
        return np.array(self._log.skipped, np.bool_)[self._rows]

    def __getitem__(self, name: str) -> Floats:
        """A field; NaN where it is absent, not finite, huge or of another type."""
        if name not in self._kept:
            values = np.array(self._log.columns[name])[self._rows]
            size = np.abs(values)
            values[size > _MAX_VALUE] = _NAN
            values[size < 1 / _MAX_VALUE] = 0.0
            self._kept[name] = values
        return self._kept[name]

    def or_zero(self, name: str) -> Floats:
        return np.nan_to_num(self[name])

    def known(self, name: str) -> Floats:
        return known(self[name])

    def last(self, name: str) -> float | None:
        """Of the last step."""
        return None if not len(self) or np.isnan(self[name][-1]) else float(self[name][-1])

    def sums(self, name: str, where: Bools | None = None) -> dict[str, float]:
        """Of `CAUSES` or a declared count, by name, over the steps that are true in `where`."""
        rows = np.zeros(self._length, np.bool_)
        rows[self._rows if where is None else self._rows[where]] = True
        return self._log.named[name].sums(rows)


@dataclass(frozen=True)
class Records:
    """The current records of a rank: of steps, and the `others` in the order in which they were
    written."""

    steps: Steps
    others: tuple[Record, ...]
    _places: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        log = RecordLog()
        for record in records:
            log.append(record)
        return log.current()

    @cached_property
    def by_kind(self) -> dict[str, list[Record]]:
        """The others."""
        found: dict[str, list[Record]] = {}
        for record in self.others:
            found.setdefault(record["event"], []).append(record)
        return found

    @cached_property
    def _timed(self) -> tuple[Ints, Floats]:
        """Place and time of all records that have one, in the order of the file."""
        times = np.array([finite(r, "time") for r in self.others], np.float64)
        places = np.append(np.array(self._places, np.int64), self.steps.place)
        times = np.append(times, self.steps["time"])
        order = np.argsort(places)
        order = order[~np.isnan(times[order])]
        return places[order], times[order]

    @property
    def last_time(self) -> float | None:
        """Of the latest record."""
        times = self._timed[1]
        return float(times[-1]) if len(times) else None

    def elapsed_s(self) -> float | None:
        """The sum over processes from their start to their last record, without the pauses between
        them; None before the first start."""
        places, times = self._timed
        pairs = zip(self._places, self.others, strict=True)
        starts = [
            (place, time)
            for place, record in pairs
            if record["event"] == "start" and (time := finite(record, "time")) is not None
        ]
        if not starts:
            return None
        next_places = [*(place for place, _ in starts[1:]), places[-1] + 1]
        ends = times[np.searchsorted(places, next_places) - 1]
        return float(np.sum(ends - np.array([time for _, time in starts])))
