"""T = S · N · e of a run: what one rank does alone, how many there are, and what is lost on the way.

T is the number of images that an update has used, over the whole time of the training. S is what one rank
computes in the time in which it computes. Every second between them has one cause, so that e and the
shares of the causes add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.core.units import format_percent
from paceline.report.bottleneck import ExposedWaits, first_after_start
from paceline.report.outcome import Outcome
from paceline.report.quantities import rate
from paceline.report.records import Record, finite, known
from paceline.report.run_files import RunFiles, finite_values

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
        steps = run.steps()
        timed = steps.or_zero("step_s") > 0
        lengths, first = steps["step_s"][timed], first_after_start(run)[timed]
        images = steps.or_zero("images_per_s")[timed] * lengths
        all_images = float(images.sum())
        if all_images <= 0:
            return None
        outcome = Outcome.of(run)
        if outcome.rehearsed is not None:
            return None
        ranks = outcome.world_size or 1
        # What the first step after each start took longer than the others.
        startup_s = float(np.maximum(lengths[first] - np.median(lengths), 0.0).sum())
        steps_s = float(lengths.sum())
        stepping_s = steps_s - startup_s
        shares = _shares_of_a_step(run, ranks)
        # All skipped steps together, of which the parts of a step are not told apart.
        of_skipped = float(images[steps.skipped[timed]].sum()) / all_images
        seconds = {cause: share * stepping_s for cause, share in shares.items()}
        computing_s = max(stepping_s - sum(seconds.values()), 1e-9)
        seconds[SKIPPED] = of_skipped * computing_s
        seconds[EVALUATION] = sum(finite_values(run.of_kind("eval"), "eval_s"))
        seconds[SAVING] = sum(_stall_s(record) for record in run.of_kind("checkpoint"))
        known_s = steps_s + seconds[EVALUATION] + seconds[SAVING]
        whole_s = max(known_s, outcome.train_s or 0.0)
        seconds[OTHER] = whole_s - known_s + startup_s
        lost = {cause: max(0.0, seconds.get(cause, 0.0)) / whole_s for cause in CAUSES}
        alone = all_images / computing_s / ranks
        return cls((1 - of_skipped) * all_images / whole_s, alone, ranks, lost)

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


def _shares_of_a_step(run: RunFiles, ranks: int) -> dict[str, float]:
    """What a mean rank waits for in a step: the exchange itself, the slowest rank, and its input. Without
    the first step after each start."""
    waits, steps = ExposedWaits.of(run), run.steps()
    shares = {COMMUNICATION: 0.0, STRAGGLER: 0.0, INPUT: _input_share(run)}
    usable = (steps.or_zero("step_s") > 0) & ~first_after_start(run)
    _, waited, stepped = np.intersect1d(
        waits.step, steps.number[usable], assume_unique=True, return_indices=True
    )
    if total := float(steps["step_s"][usable][stepped].sum()):
        # The last rank waits for the exchange alone, the others for that rank as well.
        late = np.maximum(waits.others_s - waits.least_s, 0.0)[waited]
        late_s = float(late[waits.complete[waited]].sum())
        shares[COMMUNICATION] = float(waits.least_s[waited].sum()) / total
        shares[STRAGGLER] = late_s * (ranks - 1) / ranks / total
    # Measured on different ranks, they may add up to more than a step.
    scale = max(1.0, sum(shares.values()) / 0.98)
    return {cause: share / scale for cause, share in shares.items()}


def _input_share(run: RunFiles) -> float:
    """Of the mean rank; of many ranks rank 0 has recorded the median."""
    shares = []
    for rank in run.ranks:
        steps, later = run.steps(rank), ~first_after_start(run, rank)
        total = float(known(steps["step_s"][later]).sum())
        if total > 0:
            # Before stalls were measured, the wait of the host stands in for them.
            stalls = known(steps["input_stall_s"][later])
            stalls = stalls if len(stalls) else known(steps["data_s"][later])
            shares.append(float(stalls.sum()) / total)
    of_all = [
        (finite(record["input_stall_s"], "median"), finite(record["step_s"], "median"))
        for record in run.of_kind("ranks")
        if isinstance(record.get("input_stall_s"), dict) and isinstance(record.get("step_s"), dict)
    ]
    measured = [(stall, length) for stall, length in of_all if stall is not None and length]
    if measured:
        return sum(stall for stall, _ in measured) / sum(length for _, length in measured)
    return fmean(shares) if shares else 0.0
