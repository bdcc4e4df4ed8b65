"""The bottleneck of a step: compute, exposed communication, input, a straggler or an overloaded host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.core.host import NOTABLE_WAIT
from paceline.core.units import format_duration, format_percent, text_of
from paceline.core.untrusted import is_count
from paceline.report.records import CAUSES, Bools, Floats, Ints, Record, finite, middle
from paceline.report.run_files import RunFiles, computed_once, finite_values

# A smaller share of a step is not a bottleneck.
_NOTABLE = 0.05
# Ranks of equal speed take turns in arriving last, and noise lets one of them lose slightly more often.
_STRAGGLER_SHARE = 2 / 3
_STRAGGLER_MIN_STEPS = 5


@dataclass(frozen=True)
class Straggler:
    """The rank for whose gradients the other ranks nearly always wait.

    Attributes:
        rank: The number of the rank.
        share_last: The fraction of steps in which this rank ends its backward pass last.
        lost_s: The median seconds per step that the other ranks wait for this rank.
    """

    rank: int
    share_last: float
    lost_s: float

    def describe(self) -> str:
        last = format_percent(100 * self.share_last, 0)
        return (
            f"rank {self.rank}: last in {last} of the steps, "
            f"others wait {format_duration(self.lost_s)}"
        )


@dataclass(frozen=True)
class ExposedWaits:
    """How long ranks wait for the gradient all-reduce after their backward pass, in each step.

    The rank that ends its backward pass last waits only for communication. All other ranks also
    wait for that rank.

    Attributes:
        step: The step numbers; the following arrays have one entry for each of these steps.
        last: The rank that ended its backward pass last.
        least_s: The wait of the last rank in seconds.
        other_ranks_s: The median wait of the other ranks in seconds.
        complete: True if the waits of all ranks are known.
        step_s: The median step time of rank 0 in seconds.
    """

    step: Ints
    last: Ints
    least_s: Floats
    other_ranks_s: Floats
    complete: Bools
    step_s: float

    @classmethod
    @computed_once
    def of(cls, run: RunFiles) -> ExposedWaits:
        """Computes the waits of a run; arrays are empty for one rank or without recorded waits."""
        step_s = middle(run.steps()["step_s"]) or 0.0
        none = np.zeros(0)
        if (finite(run.start, "world_size") or 1) <= 1:
            return cls(none.astype(int), none.astype(int), none, none, none.astype(bool), step_s)
        parts = [_waits_of_ranks(run), _waits_of_records(run.of_kind("ranks"))]
        step, last, least_s, other_ranks_s, complete = map(np.concatenate, zip(*parts, strict=True))
        # Keep the last row of each step: rank 0's records about all ranks take precedence.
        order = np.argsort(step, kind="stable")
        is_last = np.ones(len(order), bool)
        is_last[:-1] = np.diff(step[order]) > 0
        order = order[is_last]
        return cls(
            step[order], last[order], least_s[order], other_ranks_s[order], complete[order], step_s
        )

    @property
    def exposed_s(self) -> float | None:
        """The median wait in seconds of the rank that ended its backward pass last.

        None if no rank ever waited.
        """
        return middle(self.least_s) if self.least_s.any() else None

    def describe(self) -> str:
        """Returns the exposed communication as text such as `12.3 ms a step (8 %)`."""
        if self.exposed_s is None:
            return ""
        share = 100 * self.exposed_s / self.step_s if self.step_s > 0 else None
        return f"{format_duration(self.exposed_s)} a step ({format_percent(share, 0)})"

    def straggler(self) -> Straggler | None:
        """Returns the rank for which the others nearly always wait notably, or None if there is none."""
        last = self.last[self.complete]
        if len(last) < _STRAGGLER_MIN_STEPS:
            return None
        ranks, times = np.unique(last, return_counts=True)
        rank, share = int(ranks[times.argmax()]), float(times.max() / len(last))
        late_s = (self.other_ranks_s - self.least_s)[self.complete]
        lost_s = float(np.median(np.where(last == rank, late_s, 0.0)))
        if share < _STRAGGLER_SHARE or lost_s < _NOTABLE * self.step_s:
            return None
        return Straggler(rank, share, lost_s)


_Waits = tuple[Ints, Ints, Floats, Floats, Bools]


def _waits_of_ranks(run: RunFiles) -> _Waits:
    """Computes how long each rank waited for the all-reduce, from the step records of each rank."""
    step = np.unique(np.concatenate([run.steps(rank).number for rank in run.ranks]))
    waits = np.full((len(run.ranks), len(step)), np.nan)
    for row, rank in enumerate(run.ranks):
        steps = run.steps(rank)
        waits[row, np.searchsorted(step, steps.number)] = steps["exposed_comm_s"]
    present = ~np.isnan(waits)
    any_rank = present.any(axis=0)
    step, waits, present = step[any_rank], waits[:, any_rank], present[:, any_rank]
    if not len(step):
        return step, step, np.zeros(0), np.zeros(0), np.zeros(0, np.bool_)
    columns, ranks = np.arange(len(step)), np.array(list(run.ranks))
    row = np.nanargmin(waits, axis=0)
    least_s = waits[row, columns]
    # Sorting moves NaN to the end: missing ranks, and the last rank, which is excluded from the median.
    waits[row, columns] = np.nan
    waits.sort(axis=0)
    counts = present.sum(axis=0)
    others = np.maximum(counts - 1, 1)
    middle_s = (waits[(others - 1) // 2, columns] + waits[others // 2, columns]) / 2
    other_ranks_s = np.where(counts > 1, middle_s, least_s)
    complete = (counts == counts.max()) & (counts > 1)
    return step, ranks[row], least_s, other_ranks_s, complete


def _waits_of_records(records: list[Record]) -> _Waits:
    """Reads the waits of all ranks from rank 0's records; skips damaged records."""
    rows = []
    for record in records:
        exposed = record.get("exposed_comm_s")
        if isinstance(exposed, dict) and is_count(exposed.get("rank")):
            least_s, other_ranks_s = finite(exposed, "min"), finite(exposed, "others")
            if least_s is not None and other_ranks_s is not None:
                rows.append((record["step"], exposed["rank"], least_s, other_ranks_s))
    step, rank, least, other = zip(*rows, strict=True) if rows else ((), (), (), ())
    ints = np.array(step, np.int64), np.array(rank, np.int64)
    return (*ints, np.array(least, float), np.array(other, float), np.ones(len(rows), np.bool_))


def first_after_start(run: RunFiles, rank: int = 0) -> Bools:
    """Returns a mask of the first step after each start or resume.

    This step is slow because it fills the input pipeline, compiles, and captures CUDA graphs.
    """
    first = [record["step"] + 1 for record in run.of_kind("start", rank)]
    return np.isin(run.steps(rank).number, first)


@dataclass(frozen=True)
class InputStall:
    """Time in which the device waits for a batch.

    Attributes:
        steps: The number of steps for which the wait was measured.
        step_s: The total time of these steps in seconds.
        causes: The seconds of waiting by cause, such as `decode`, largest first.
    """

    steps: int
    step_s: float
    causes: dict[str, float]

    @classmethod
    @computed_once
    def of(cls, run: RunFiles, rank: int = 0) -> InputStall:
        """Sums the waits of a rank for its batches; leaves out the first step after each start."""
        steps = run.steps(rank)
        measured = ~np.isnan(steps["input_stall_s"]) & ~np.isnan(steps["step_s"])
        measured &= ~first_after_start(run, rank)
        causes: dict[str, float] = {}
        for name, seconds in steps.sums(CAUSES, measured).items():
            causes[text_of(name)] = causes.get(text_of(name), 0.0) + seconds
        largest_first = sorted(causes.items(), key=lambda cause: -cause[1])
        step_s = float(steps["step_s"][measured].sum())
        return cls(int(measured.sum()), step_s, dict(largest_first))

    @property
    def stall_s(self) -> float:
        return sum(self.causes.values())

    @property
    def share(self) -> float:
        """The fraction of the step time in which the device waits for a batch, from 0 to 1."""
        return self.stall_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def main_cause(self) -> str:
        """The cause of most of the waiting; empty if it takes less than 5 % of the step time."""
        return next(iter(self.causes), "") if self.share >= _NOTABLE else ""

    def describe(self) -> str:
        """Returns text such as `12.3 ms a step (8 %), most of it decode`; empty without measurements."""
        if not self.steps:
            return ""
        mean = format_duration(self.stall_s / self.steps)
        text = f"{mean} a step ({format_percent(100 * self.share, 0)})"
        return f"{text}, most of it {self.main_cause}" if self.main_cause else text


@dataclass(frozen=True)
class MeasuredStep:
    """How a typical step divides into compute, communication and waiting, in seconds.

    `input_s` is a mean, because a median hides stalls that come in bursts. The other times are medians.
    """

    step_s: float
    input_s: float
    exposed_s: float
    straggler: Straggler | None

    @property
    def compute_s(self) -> float:
        return self.step_s - self.input_s - self.exposed_s

    @classmethod
    def of(cls, run: RunFiles) -> MeasuredStep | None:
        """Computes the times from a run's records; returns None if the run has no step yet."""
        step_s = middle(run.steps()["step_s"])
        if step_s is None:
            return None
        waits = ExposedWaits.of(run)
        input_s = InputStall.of(run).share * step_s
        return cls(step_s, input_s, waits.exposed_s or 0.0, waits.straggler())


def bound_by(run: RunFiles) -> str | None:
    """Names what limits the speed, as `exposed communication, 31 % of a step`; None without steps."""
    measured = MeasuredStep.of(run)
    if measured is None:
        return None
    # Threads that wait for cores slow compute, input and exchange alike, so check them first.
    if overload := overloaded_host(run):
        return overload
    if measured.straggler:
        return f"straggler {measured.straggler.describe()}"
    cause = InputStall.of(run).main_cause
    parts = {
        f"input ({cause})" if cause else "input": measured.input_s,
        "exposed communication": measured.exposed_s,
    }
    name, seconds = max(parts.items(), key=lambda part: part[1])
    if seconds < _NOTABLE * measured.step_s:
        return "compute"
    return f"{name}, {format_percent(100 * seconds / measured.step_s, 0)} of a step"


def overloaded_host(run: RunFiles) -> str | None:
    """Describes the rank whose threads wait longest for CPU cores; None if this slows no steps."""
    waits = {
        rank: middle(run.steps(rank)["core_wait_share"]) or 0.0
        for rank in run.ranks
        # Host threads slow the steps of a GPU only if the GPU waits for its input.
        if _on_cpu(run, rank) or InputStall.of(run, rank).main_cause
    }
    # If there are many ranks, only rank 0 writes records. They also name the rank that waited longest.
    of_all = [
        record["core_wait_share"]
        for record in run.of_kind("ranks")
        if _on_cpu(run, 0) and isinstance(record.get("core_wait_share"), dict)
    ]
    longest = Counter(int(w["rank"]) for w in of_all if is_count(w.get("rank"))).most_common(1)
    if longest:
        waits[longest[0][0]] = median(finite_values(of_all, "max") or [0.0])
    rank = max(waits, key=lambda rank: waits[rank], default=None)
    if rank is None or waits[rank] < NOTABLE_WAIT:
        return None
    who = f"rank {rank}'s threads" if (finite(run.start, "world_size") or 1) > 1 else "threads"
    waited = format_percent(100 * waits[rank], 0)
    settings = run.config.get("run")
    has_one = isinstance(settings, dict) and settings.get("threads") == 1
    has_one = has_one or run.chosen("threads").partition(" ")[0] == "1"
    fewer = "" if has_one else ", or set run.threads=1"
    return (
        f"an overloaded host: {who} waited for cores {waited} of the time; stop other work{fewer}"
    )


def _on_cpu(run: RunFiles, rank: int) -> bool:
    start = (run.of_kind("start", rank) or [{}])[-1]
    hardware = start.get("hardware")
    return isinstance(hardware, dict) and hardware.get("device") == "cpu"
