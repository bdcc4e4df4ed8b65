"""Predicted against measured: did the planner tell the truth?

In: a run folder with the plan that it executed, the planner's expectation in it, and, where the run was
traced, every buffer's times. Out: a table of both side by side, buffer by buffer, and one line of
verdict: what bounds the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.host_load import NOTABLE_WAIT
from paceline.core.untrusted import ParseError, is_count, is_finite, parse_json
from paceline.plan.plan_file import Expected, PlanFile
from paceline.report.quantities import percent, shown
from paceline.report.run_files import RunFiles, finite, median
from paceline.report.tables import ExposedWaits, Table, milliseconds

# Input stalls: how long steps stood still for want of a batch, and what caused it.
#
# In: `input_stall_s` and `input_stall_causes` of a run's records. Out: the share of the steps'
# time, the causes in order, and one line in words. Records from before these fields existed give
# nothing.


# Below this share of the steps' time nobody need look at the input.
_NOTABLE = 0.05


@dataclass(frozen=True)
class InputStall:
    """Seconds over `steps` steps, which took `step_s` in all; `causes` from the largest on."""

    steps: int
    step_s: float
    causes: dict[str, float]

    @classmethod
    def of(cls, run: RunFiles, rank: int = 0) -> InputStall:
        """The first step after each start waits for the pipeline to fill, and is left out."""
        first = {record["step"] + 1 for record in run.of_kind("start", rank)}
        steps, step_s, causes = 0, 0.0, dict[str, float]()
        for record in run.of_kind("step", rank):
            stall_s, length_s = finite(record, "input_stall_s"), finite(record, "step_s")
            if stall_s is None or length_s is None or record["step"] in first:
                continue
            steps, step_s = steps + 1, step_s + length_s
            told = record.get("input_stall_causes")
            told = told if isinstance(told, dict) else {}
            for name in told:
                seconds = finite(told, name)
                if seconds is not None and seconds > 0:
                    causes[shown(name)] = causes.get(shown(name), 0.0) + seconds
        ordered = sorted(causes.items(), key=lambda cause: -cause[1])
        return cls(steps, step_s, dict(ordered))

    @property
    def stall_s(self) -> float:
        return sum(self.causes.values())

    @property
    def share(self) -> float:
        """Of the steps' time."""
        return self.stall_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def main_cause(self) -> str:
        """Empty where the input hardly costs anything."""
        return next(iter(self.causes), "") if self.share >= _NOTABLE else ""

    def describe(self) -> str:
        """`12.3 ms a step (8 %), most of it decode`; empty where nothing was told."""
        if not self.steps:
            return ""
        words = f"{milliseconds(self.stall_s / self.steps)} a step ({percent(100 * self.share, 0)})"
        return f"{words}, most of it {self.main_cause}" if self.main_cause else words


def stall_table(run: RunFiles) -> Table:
    """A row a cause and rank; without rows where no step stood still for its input."""
    rows = []
    for rank in run.ranks:
        stall = InputStall.of(run, rank)
        for cause, seconds in stall.causes.items():
            share = percent(100 * seconds / stall.step_s, 1)
            rows.append((str(rank), cause, milliseconds(seconds / stall.steps), share))
    columns = ("rank", "cause", "a step", "of the steps' time")
    return Table.of("Waiting for the input", columns, rows, {1})


# Below this share of a step a part is no bottleneck.
_NOTABLE_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a run, in seconds; `input_s` is a mean, for stalls come in bursts, which
    a median would hide. Older records have what the host waited, and its median only."""

    step_s: float
    input_s: float
    exposed_s: float
    straggler: str

    @classmethod
    def of(cls, run: RunFiles) -> Measured | None:
        steps = run.of_kind("step")
        lengths = [s for r in steps if (s := finite(r, "step_s")) is not None]
        if not lengths:
            return None
        data = [s for r in steps if (s := finite(r, "data_s")) is not None]
        step_s, stall = median(lengths), InputStall.of(run)
        # On a GPU the host waits while the device works: only the device's own stall is the input's.
        waited_s = stall.share * step_s if stall.steps else median(data) if data else 0.0
        waits = ExposedWaits.of(run)
        late = waits.straggler()
        return cls(
            step_s, waited_s, waits.exposed_s or 0.0, late.describe() if late else "",
        )  # fmt: skip


def bound_by(run: RunFiles) -> str | None:
    """`exposed communication, 31 % of a step`; None before the first step."""
    found = Measured.of(run)
    if found is None:
        return None
    if overload := overloaded_host(run):
        return overload
    if found.straggler:
        return f"straggler {found.straggler}"
    main_cause = InputStall.of(run).main_cause
    cause = f" ({main_cause})" if main_cause else ""
    parts = {f"input{cause}": found.input_s, "exposed communication": found.exposed_s}
    name, seconds = max(parts.items(), key=lambda part: part[1])
    if seconds < _NOTABLE_DIFFERENCE * found.step_s:
        return "compute"
    return f"{name}, {seconds / found.step_s:.0%} of a step"


def overloaded_host(run: RunFiles) -> str | None:
    """Of the rank whose threads waited longest for cores, where that decides about its steps; None for a
    sound host. Waiting threads make compute, input and exchange slow alike, so this comes before them."""
    worst, rank = 0.0, 0
    for number in run.ranks:
        steps = run.of_kind("step", number)
        shares = [s for r in steps if (s := finite(r, "core_wait_share")) is not None]
        # On a GPU a step may not depend on the host's threads: only where it waits for its input.
        counts = _on_cpu(run, number) or InputStall.of(run, number).main_cause
        if shares and counts and median(shares) > worst:
            worst, rank = median(shares), number
    if worst < NOTABLE_WAIT:
        return None
    who = f"rank {rank}'s threads" if len(run.ranks) > 1 else "threads"
    return (
        f"an overloaded host: {who} waited for cores {worst:.0%} of the time; "
        "stop other work, or set run.threads=1"
    )


def _on_cpu(run: RunFiles, rank: int) -> bool:
    start = (run.of_kind("start", rank) or [{}])[-1]
    hardware = start.get("hardware")
    return isinstance(hardware, dict) and hardware.get("device") == "cpu"


def expected_of(run: RunFiles) -> Expected | None:
    try:
        return PlanFile.read(run.path / "plan.toml").expected
    except ConfigError:
        return None


def expectation_table(run: RunFiles) -> Table:
    """Without rows where the plan came from no planner."""
    expected, found = expected_of(run), Measured.of(run)
    columns = ("part", "predicted ms", "measured ms", "difference")
    if expected is None or found is None:
        return Table.of("Predicted and measured", columns, [], {0})
    compute = found.step_s - found.input_s - found.exposed_s
    rows = [
        _row("step", expected.step_s, found.step_s),
        _row("compute", expected.compute_s, compute),
        _row("exposed communication", expected.exposed_comm_s, found.exposed_s),
        _row("input", expected.input_stall_s, found.input_s),
    ]
    traced = traced_buffers(run.path / "trace.json")
    for number, seconds in enumerate(expected.buffers_s):
        if number in traced:
            rows.append(_row(f"buffer {number + 1}", seconds, traced[number]))
    return Table.of("Predicted and measured", columns, rows, {0}, max_rows=200)


def _row(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    apart = f"{predicted / measured - 1:+.0%}" if measured > 0 and predicted > 0 else "–"
    return name, f"{1e3 * predicted:.2f}", f"{1e3 * measured:.2f}", apart


def traced_buffers(path: Path) -> dict[int, float]:
    """Seconds of each buffer's exchange: in every step from the last rank's begin to the end, since those
    before only wait for it; the median over steps."""
    try:
        events = parse_json(path.read_bytes())["traceEvents"]
    except (OSError, ParseError, KeyError, TypeError):
        return {}
    begun: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict) or event.get("cat") != "exchange" or event.get("ph") != "X":
            continue
        details = event.get("args")
        if not isinstance(details, dict) or not all(is_finite(event.get(n)) for n in ("ts", "dur")):
            continue
        step, buffer = details.get("step"), details.get("buffer")
        if not is_count(step) or not is_count(buffer):
            continue
        key = step, buffer
        begun[key] = max(begun.get(key, 0.0), event["ts"])
        ended[key] = max(ended.get(key, 0.0), event["ts"] + event["dur"])
    by_buffer: dict[int, list[float]] = {}
    for key, start in begun.items():
        by_buffer.setdefault(key[1], []).append((ended[key] - start) / 1e6)
    return {number: median(times) for number, times in by_buffer.items()}
