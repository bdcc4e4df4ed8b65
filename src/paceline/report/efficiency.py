"""T = S · N · e of a run: what one rank does alone, how many there are, and what is lost on the way.

T is the number of images that an update has used, over the whole time of the training. S is what one rank
computes in the time in which it computes. Every second between them has one cause, so that e and the
shares of the causes add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from paceline.core.units import format_percent
from paceline.report.bottleneck import ExposedWaits
from paceline.report.outcome import Outcome
from paceline.report.quantities import rate
from paceline.report.run_files import Record, RunFiles, finite, finite_values

# The causes of lost time, in the order of the bar.
COMMUNICATION, INPUT, STRAGGLER = "exposed communication", "input", "waiting for the slowest rank"
SKIPPED, EVALUATION, SAVING, OTHER = "skipped steps", "evaluation", "saving", "start-up and other"
CAUSES = (COMMUNICATION, INPUT, STRAGGLER, SKIPPED, EVALUATION, SAVING, OTHER)
# A smaller share is not named.
_NOTABLE = 0.005


@dataclass(frozen=True)
class Efficiency:
    """Images per second of all ranks (`total`, T) and of one rank alone (`alone`, S); `ranks` (N);
    `lost` has the share of the time that went to each of `CAUSES`."""

    total: float
    alone: float
    ranks: int
    lost: dict[str, float]

    @property
    def e(self) -> float:
        """Scaling efficiency over the whole training, evaluations and checkpoints included."""
        return max(0.0, 1.0 - sum(self.lost.values()))

    @classmethod
    def of(cls, run: RunFiles) -> Efficiency | None:
        """None before the first step, where its records lack the times, and for a rehearsal, whose ranks
        are virtual: one process does the work of all."""
        return run.derived((cls,), lambda: cls._of(run))

    @classmethod
    def _of(cls, run: RunFiles) -> Efficiency | None:
        steps = [r for r in run.of_kind("step") if (finite(r, "step_s") or 0.0) > 0]
        images = [(finite(r, "images_per_s") or 0.0) * (finite(r, "step_s") or 0.0) for r in steps]
        if not steps or sum(images) <= 0:
            return None
        outcome = Outcome.of(run)
        if outcome.rehearsed is not None:
            return None
        ranks = outcome.world_size or 1
        lengths = [finite(r, "step_s") or 0.0 for r in steps]
        startup_s = _startup_s(run, steps)
        stepping_s = sum(lengths) - startup_s
        shares = _shares_of_a_step(run, ranks)
        # All skipped steps together, of which the parts of a step are not told apart.
        skipped = [r.get("skipped") is True for r in steps]
        of_skipped = sum(n for n, lost in zip(images, skipped, strict=True) if lost) / sum(images)
        seconds = {cause: share * stepping_s for cause, share in shares.items()}
        computing_s = max(stepping_s - sum(seconds.values()), 1e-9)
        seconds[SKIPPED] = of_skipped * computing_s
        seconds[EVALUATION] = sum(run.values("eval", "eval_s"))
        seconds[SAVING] = sum(_stall_s(record) for record in run.of_kind("checkpoint"))
        known_s = sum(lengths) + seconds[EVALUATION] + seconds[SAVING]
        whole_s = max(known_s, outcome.train_s or 0.0)
        seconds[OTHER] = whole_s - known_s + startup_s
        lost = {cause: max(0.0, seconds.get(cause, 0.0)) / whole_s for cause in CAUSES}
        alone = sum(images) / computing_s / ranks
        return cls((1 - of_skipped) * sum(images) / whole_s, alone, ranks, lost)

    @property
    def largest_loss(self) -> str:
        """The cause of most of the lost time; empty where hardly any was lost."""
        cause = max(self.lost, key=lambda cause: self.lost[cause])
        return cause if self.lost[cause] >= _NOTABLE else ""

    def notable(self) -> list[tuple[str, float]]:
        """The causes that matter, in the order of the bar."""
        return [(cause, share) for cause, share in self.lost.items() if share >= _NOTABLE]

    def describe(self) -> str:
        """`1,400 = 800 · 2 · 0.875 images/s; lost to: input 10 %, saving 2 %`."""
        formula = f"{rate(self.total)} = {rate(self.alone)} · {self.ranks} · {self.e:.3f} images/s"
        lost = sorted(self.notable(), key=lambda item: -item[1])
        named = ", ".join(f"{cause} {format_percent(100 * share, 0)}" for cause, share in lost)
        return f"{formula}; lost to: {named}" if named else formula


def _stall_s(record: Record) -> float:
    """Records from before the background writer have no `stall_s`: all of the save was a stall."""
    stall_s = finite(record, "stall_s")
    return (finite(record, "save_s") or 0.0) if stall_s is None else stall_s


def _startup_s(run: RunFiles, steps: list[Record]) -> float:
    """What the first step after each start took longer than the others: filling the pipeline, compiling,
    capturing graphs."""
    usual_s = median(finite_values(steps, "step_s"))
    first = {record["step"] + 1 for record in run.of_kind("start")}
    return sum(
        max(0.0, (finite(r, "step_s") or 0.0) - usual_s) for r in steps if r["step"] in first
    )


def _shares_of_a_step(run: RunFiles, ranks: int) -> dict[str, float]:
    """What a mean rank waits for in a step: the exchange itself, the slowest rank, and its input. Without
    the first step after each start."""
    waits, first = ExposedWaits.of(run), {r["step"] + 1 for r in run.of_kind("start")}
    lengths = {r["step"]: finite(r, "step_s") or 0.0 for r in run.of_kind("step")}
    known = {
        step: wait
        for step, wait in waits.by_step.items()
        if step not in first and lengths.get(step, 0.0) > 0
    }
    shares = {COMMUNICATION: 0.0, STRAGGLER: 0.0, INPUT: _input_share(run)}
    if total := sum(lengths[step] for step in known):
        # The last rank waits for the exchange alone, the others for that rank as well.
        late_s = sum(max(0.0, w.others_s - w.least_s) for w in known.values() if w.complete)
        shares[COMMUNICATION] = sum(w.least_s for w in known.values()) / total
        shares[STRAGGLER] = late_s * (ranks - 1) / ranks / total
    # Measured on different ranks, they may add up to more than a step.
    scale = max(1.0, sum(shares.values()) / 0.98)
    return {cause: share / scale for cause, share in shares.items()}


def _input_share(run: RunFiles) -> float:
    """Of the mean rank; of many ranks rank 0 has recorded the median."""
    shares = []
    for rank in run.ranks:
        first = {record["step"] + 1 for record in run.of_kind("start", rank)}
        records = [r for r in run.of_kind("step", rank) if r["step"] not in first]
        total = sum(finite_values(records, "step_s"))
        if total > 0:
            # Before stalls were measured, the wait of the host stands in for them.
            field = "input_stall_s" if any("input_stall_s" in r for r in records) else "data_s"
            shares.append(sum(finite_values(records, field)) / total)
    of_all = [
        (finite(record["input_stall_s"], "median"), finite(record["step_s"], "median"))
        for record in run.of_kind("ranks")
        if isinstance(record.get("input_stall_s"), dict) and isinstance(record.get("step_s"), dict)
    ]
    known = [(stall, length) for stall, length in of_all if stall is not None and length]
    if known:
        return sum(stall for stall, _ in known) / sum(length for _, length in known)
    return fmean(shares) if shares else 0.0
