"""Input stalls: how long steps stood still for want of a batch, and what caused it.

In: `input_stall_s` and `input_stall_causes` of a run's records. Out: the share of the steps' time, the
causes in order, and one line in words. Records from before these fields existed give nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.quantities import percent, shown
from paceline.report.run_files import RunFiles, finite
from paceline.report.straggler import milliseconds
from paceline.report.tables import Table

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
