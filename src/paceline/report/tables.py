"""Tables of a run: result, evaluations, configuration, environment.

In: a `RunFiles`. Out: `Table`s of plain text cells, or rows of (label, value), for the terminal and
the page alike. A table that would be endless shows its first rows and says how many it left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.outcome import Outcome
from paceline.report.quantities import (
    UNKNOWN,
    count,
    duration,
    loss,
    number,
    percent,
    rate,
    shown,
)
from paceline.report.run_files import Record, RunFiles, finite, median

# Exposed communication, and the rank that the others wait for.
#
# In: for each step how long each rank waited for the exchange after its own backward pass
# (`exposed_comm_s` of its records). Out: what the exchange itself costs a step, and the
# straggler, if there is one. The rank that arrives last waits for nobody: its wait is the
# exchange alone, and what the others wait longer, they wait for it.


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


Row = tuple[str, ...]
MAX_ROWS = 200


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title. `text_columns` are set to the left, the others to the right."""

    title: str
    columns: Row
    rows: tuple[Row, ...]
    text_columns: frozenset[int] = frozenset({0})
    note: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        columns: Row,
        rows: Sequence[Row],
        text_columns: set[int],
        max_rows: int = MAX_ROWS,
    ) -> Table:
        """A table of at most `max_rows` rows."""
        left_out = len(rows) - max_rows
        note = f"{count(left_out)} more not shown" if left_out > 0 else ""
        return cls(title, columns, tuple(rows[:max_rows]), frozenset(text_columns), note)


def result_rows(run: RunFiles) -> list[tuple[str, str]]:
    """The figures of the run; what does not apply is left out."""
    outcome = Outcome.of(run)
    steps = count(outcome.steps)
    if outcome.total_steps and outcome.total_steps != outcome.steps:
        steps += f" of {count(outcome.total_steps)}"
    rows = [
        ("top-1", percent(outcome.top1)),
        ("top-5", percent(outcome.top5)),
        ("images/s", rate(outcome.images_per_s)),
        ("training time", duration(outcome.train_s)),
        ("epochs", number(outcome.epochs)),
        ("steps", steps),
        ("global batch", count(outcome.global_batch_size)),
        ("ranks", count(outcome.world_size)),
        ("stopped by", outcome.stopped_by or ("not ended" if run.summary is None else UNKNOWN)),
    ]
    if outcome.best_top1 is not None and outcome.best_top1 > (outcome.top1 or 0.0) + 0.005:
        rows.insert(1, ("best top-1", percent(outcome.best_top1)))
    if outcome.time_to_target_s is not None:
        rows.insert(4, ("time to target", duration(outcome.time_to_target_s)))
    waits = ExposedWaits.of(run)
    straggler = waits.straggler()
    if waits.exposed_s is not None:
        rows.insert(-1, ("exposed communication", waits.describe()))
    if straggler is not None:
        rows.insert(-1, ("straggler", straggler.describe()))
    for label, amount in (
        ("corrupt training images", outcome.corrupt_samples),
        ("corrupt validation images", outcome.corrupt_val_samples),
        ("skipped steps", outcome.skipped_steps),
        ("steps without a finite loss", outcome.steps_without_loss),
        ("resumes", outcome.resumes),
        ("reads that were repeated", outcome.read_retries),
        ("damaged samples in the cache", outcome.damaged_cache_entries),
    ):
        if amount:
            rows.append((label, count(amount)))
    return rows


def epoch_table(run: RunFiles) -> Table:
    """One row an evaluation, with the training since the one before it."""
    rows, steps, place = [], sorted(run.of_kind("step"), key=lambda record: record["step"]), 0
    for record in sorted(run.of_kind("eval"), key=lambda record: record["step"]):
        first = place
        while place < len(steps) and steps[place]["step"] <= record["step"]:
            place += 1
        since = steps[first:place]
        rows.append(
            (
                number(finite(record, "epoch")),
                count(record["step"]),
                percent(finite(record, "top1")),
                percent(finite(record, "top5")),
                loss(finite(record, "loss")),
                loss(median_of(since, "loss")),
                number(finite(since[-1], "lr") if since else None),
                rate(median_of(since, "images_per_s")),
                duration(finite(record, "eval_s")),
            )
        )
    # The latest first: that is what a reader looks for, and what must not be left out.
    rows.reverse()
    columns = (
        "epoch",
        "step",
        "top-1",
        "top-5",
        "validation loss",
        "training loss",
        "learning rate",
        "images/s",
        "evaluated in",
    )
    return Table.of("Evaluations", columns, rows, set())


def configuration_tables(run: RunFiles) -> list[Table]:
    """One table a section of `config.toml`; what stands outside of sections comes first."""
    general = [(shown(k), shown(v)) for k, v in run.config.items() if not isinstance(v, dict)]
    sections = {"general": general} if general else {}
    for section, table in run.config.items():
        if isinstance(table, dict):
            sections[shown(section)] = [(key, shown(value)) for key, value in flat(table)]
    return [
        Table(name, ("", ""), tuple(rows), frozenset({0, 1})) for name, rows in sections.items()
    ]


def environment_tables(run: RunFiles) -> list[Table]:
    """Versions and hardware, and what the run chose by itself."""
    starts = run.of_kind("start")
    # A run that was killed has no summary; what it ran on is told at its start as well.
    known = (starts[-1] if starts else {}) | (run.summary or {})
    tables = []
    for title, content in (
        ("Versions", known.get("versions")),
        ("Hardware", known.get("hardware")),
        ("Chosen automatically", known.get("chosen")),
    ):
        if isinstance(content, dict) and content:
            rows = tuple((key, shown(value)) for key, value in flat(content))
            tables.append(Table(title, ("", ""), rows, frozenset({0, 1})))
    return tables


def flat(table: Record, prefix: str = "") -> list[tuple[str, Any]]:
    """Tables in tables as dotted keys."""
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{shown(key)}"
        rows += flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return rows


def median_of(records: Sequence[Record], name: str) -> float | None:
    """The median of a field over the records that have it as a finite number."""
    values = [value for record in records if (value := finite(record, name)) is not None]
    return median(values) if values else None
