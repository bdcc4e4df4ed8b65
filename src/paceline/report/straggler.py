"""Exposed communication, and the rank that the others wait for.

In: for each step how long each rank waited for the exchange after its own backward pass
(`exposed_comm_s` of its records). Out: what the exchange itself costs a step, and the straggler, if there
is one. The rank that arrives last waits for nobody: its wait is the exchange alone, and what the others
wait longer, they wait for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.report.quantities import percent
from paceline.report.run_files import RunFiles, finite
from paceline.report.series import median

# Ranks of equal speed take turns in being last, and the clock's noise makes somebody lose a little.
_SHARE_LAST = 2 / 3
_SHARE_OF_STEP = 0.05
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class Straggler:
    """`lost_s`: the median of what the other ranks wait for it in a step."""

    rank: int
    share_last: float
    lost_s: float

    def describe(self) -> str:
        last = percent(100 * self.share_last, 0)
        return f"rank {self.rank}: last in {last} of the steps, others wait {milliseconds(self.lost_s)}"


@dataclass(frozen=True)
class ExposedWaits:
    """Seconds by step (as the records count it) and rank."""

    by_step: dict[int, dict[int, float]]
    step_s: float

    @classmethod
    def of(cls, run: RunFiles) -> ExposedWaits:
        """Empty for a run of one rank, and for records from before the field existed."""
        waits: dict[int, dict[int, float]] = {}
        starts = run.of_kind("start")
        if starts and (finite(starts[-1], "world_size") or 1) > 1:
            for rank in run.ranks:
                for record in run.of_kind("step", rank):
                    wait_s = finite(record, "exposed_comm_s")
                    if wait_s is not None:
                        waits.setdefault(record["step"], {})[rank] = wait_s
        lengths = [s for r in run.of_kind("step") if (s := finite(r, "step_s")) is not None]
        return cls(waits, median(lengths) if lengths else 0.0)

    @property
    def exposed_s(self) -> float | None:
        """The median over steps of the wait of the rank that arrived last; None where nobody waited."""
        least = [min(by_rank.values()) for by_rank in self.by_step.values()]
        return median(least) if any(least) else None

    def describe(self) -> str:
        """`12.3 ms a step (8 %)`."""
        exposed_s = self.exposed_s
        if exposed_s is None:
            return ""
        share = f" ({percent(100 * exposed_s / self.step_s, 0)})" if self.step_s > 0 else ""
        return f"{milliseconds(exposed_s)} a step{share}"

    def last_ranks(self) -> dict[int, int]:
        """Who arrived last, by step, where every rank has told."""
        ranks = max((len(by_rank) for by_rank in self.by_step.values()), default=0)
        return {
            step: min(by_rank, key=lambda rank: by_rank[rank])
            for step, by_rank in self.by_step.items()
            if len(by_rank) == ranks > 1
        }

    def straggler(self) -> Straggler | None:
        """The rank that is last nearly always, and late enough to matter."""
        last = self.last_ranks()
        if len(last) < _FEWEST_STEPS:
            return None
        rank, times = Counter(last.values()).most_common(1)[0]
        lost = []
        for step in last:
            waits = self.by_step[step]
            others = [wait_s for other, wait_s in waits.items() if other != rank]
            lost.append(median(others) - waits[rank])
        share, lost_s = times / len(last), median(lost)
        if share < _SHARE_LAST or lost_s < _SHARE_OF_STEP * self.step_s:
            return None
        return Straggler(rank, share, lost_s)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
