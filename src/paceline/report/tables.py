"""`Table`, and the tables of a run: result, evaluations, incidents, configuration, environment.

Cells are plain text, for the terminal and the page alike. A long table shows its first rows and the
number of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.units import (
    UNKNOWN,
    count,
    date,
    format_bytes,
    format_duration,
    format_percent,
    loss,
    number,
    plural,
    rate,
    text_of,
)
from paceline.plan.noise import describe_noise
from paceline.report.bottleneck import (
    ExposedWaits,
    InputStall,
    MeasuredStep,
    expected_step,
    traced_buckets,
)
from paceline.report.outcome import Outcome
from paceline.report.records import Record, declared_counts, finite, middle
from paceline.report.run_files import RunFiles, checkpoint_files

Row = tuple[str, ...]
MAX_ROWS = 200


@dataclass(frozen=True)
class Table:
    """`text_columns` are aligned to the left, the others to the right. `links` has an address for the
    `link_column` of each row on a page, empty for none."""

    title: str
    columns: Row
    rows: tuple[Row, ...]
    text_columns: frozenset[int] = frozenset({0})
    note: str = ""
    links: tuple[str, ...] = ()
    link_column: int = 0

    @classmethod
    def of(
        cls,
        title: str,
        columns: Row,
        rows: Sequence[Row],
        text_columns: set[int],
        max_rows: int = MAX_ROWS,
        total: int = 0,
    ) -> Table:
        """`total`: the number of rows, where `rows` has only the first of them."""
        left_out = max(total, len(rows)) - max_rows
        note = f"{count(left_out)} more not shown" if left_out > 0 else ""
        return cls(title, columns, tuple(rows[:max_rows]), frozenset(text_columns), note)

    @classmethod
    def of_pairs(cls, title: str, values: Record) -> Table:
        """Two columns without headings, nested tables as dotted keys."""
        rows = tuple((key, text_of(value)) for key, value in flat(values))
        return cls(title, ("", ""), rows, frozenset({0, 1}))


def result_rows(run: RunFiles) -> list[tuple[str, str]]:
    """The figures of the run; those that do not apply are left out."""
    outcome, waits = Outcome.of(run), ExposedWaits.of(run)
    rows = [("top-1", format_percent(outcome.top1))]
    if outcome.best_top1 is not None and outcome.best_top1 > (outcome.top1 or 0.0) + 0.005:
        rows.append(("best top-1", format_percent(outcome.best_top1)))
    if run.shows_top5:
        rows.append(("top-5", format_percent(outcome.top5)))
    rows += [
        ("images/s", rate(outcome.images_per_s)),
        ("training time", format_duration(outcome.train_s)),
    ]
    if outcome.time_to_target_s is not None:
        rows.append(("time to target", format_duration(outcome.time_to_target_s)))
    steps = count(outcome.steps)
    if outcome.total_steps and outcome.total_steps != outcome.steps:
        steps += f" of {count(outcome.total_steps)}"
    rows += [
        ("epochs", number(outcome.epochs)),
        ("steps", steps),
        ("global batch", _batches(outcome)),
        ("ranks", count(outcome.world_size)),
    ]
    if outcome.is_virtual:
        rows[-1] = ("ranks (virtual)", count(outcome.world_size))
    rows += [(own.label, own.text) for own in outcome.figures if own.text]
    noise, batch = outcome.noise_scale or 0.0, outcome.largest_batch or 0
    if noise > 0 and batch > 0:
        described = describe_noise(noise, batch)
        rows.append(("gradient noise scale", described))
    if outcome.state_bytes_per_parameter is not None:
        rows.append(("optimizer state", f"{outcome.state_bytes_per_parameter:.3g} bytes/parameter"))
    if each := outcome.exchange_state_bytes_per_parameter:
        rows.append(("exchange state", f"{each:.3g} bytes/parameter"))
    if outcome.exchange_bytes_per_step is not None:
        rows.append(("exchanged in a step", format_bytes(outcome.exchange_bytes_per_step)))
    if waits.exposed_s is not None:
        rows.append(("exposed communication", waits.describe()))
    if straggler := waits.straggler():
        rows.append(("straggler", straggler.describe()))
    not_ended = "not ended" if run.summary is None else UNKNOWN
    rows.append(("stopped by", outcome.stopped_by or not_ended))
    incidents = {
        "corrupt training images": outcome.corrupt_samples,
        "corrupt validation images": outcome.corrupt_val_samples,
        "skipped steps": outcome.skipped_steps,
        "steps without a finite loss": outcome.steps_without_loss,
        "resumes": outcome.resumes,
        "repeated reads": outcome.read_retries,
        "damaged cache entries": outcome.damaged_cache_entries,
    }
    return rows + [(label, count(amount)) for label, amount in incidents.items() if amount]


def _batches(outcome: Outcome) -> str:
    first, largest = outcome.global_batch_size, outcome.largest_batch
    return count(first) if first == largest else f"{count(first)}, at most {count(largest)}"


def expectation_table(run: RunFiles) -> Table:
    """Predicted and measured times; without rows where the plan holds no prediction."""
    expected, measured = expected_step(run), MeasuredStep.of(run)
    rows: list[Row] = []
    if expected is not None and measured is not None:
        parts = [
            ("step", expected.step_s, measured.step_s),
            ("compute", expected.compute_s, measured.compute_s),
            ("exposed communication", expected.exposed_comm_s, measured.exposed_s),
            ("input", expected.input_stall_s, measured.input_s),
        ]
        traced = traced_buckets(run.path / "trace.json")
        for bucket, seconds in enumerate(expected.buffers_s):
            if bucket in traced:
                parts.append((f"bucket {bucket + 1}", seconds, traced[bucket]))
        for name, predicted, found in parts:
            apart = f"{predicted / found - 1:+.0%}" if found > 0 and predicted > 0 else UNKNOWN
            rows.append((name, f"{1e3 * predicted:.2f}", f"{1e3 * found:.2f}", apart))
    columns = ("part", "predicted ms", "measured ms", "difference")
    return Table.of("Predicted and measured", columns, rows, {0})


def stall_table(run: RunFiles) -> Table:
    """A row per rank and cause; without rows where no step waited for its input."""
    rows = []
    for rank in run.ranks:
        stall = InputStall.of(run, rank)
        for cause, seconds in stall.causes.items():
            share = format_percent(100 * seconds / stall.step_s, 1)
            rows.append((str(rank), cause, format_duration(seconds / stall.steps), share))
    columns = ("rank", "cause", "a step", "of the steps' time")
    return Table.of("Waiting for the input", columns, rows, {1})


def count_tables(run: RunFiles) -> list[Table]:
    """What the strategy of the run has counted by number, over all steps."""
    starts = run.of_kind("start")
    declared = declared_counts(starts[-1]) if starts else {}
    return [_count_table(run, name, *words) for name, words in declared.items()]


def _count_table(run: RunFiles, name: str, title: str, numbered: str, counted: str) -> Table:
    counts: dict[int, int] = {}
    for number_text, times in run.steps().sums(name).items():
        counts[int(number_text)] = counts.get(int(number_text), 0) + round(times)
    total = sum(counts.values())
    rows = [
        (count(at), count(times), format_percent(100 * times / total, 1))
        for at, times in sorted(counts.items())
    ]
    return Table.of(title, (numbered, counted, "share"), rows, set())


def epoch_table(run: RunFiles) -> Table:
    """A row per evaluation, latest first, with the training since the previous one."""
    rows, done, steps = [], 0, run.steps()
    for record in sorted(run.of_kind("eval"), key=lambda record: record["step"]):
        first, done = done, int(np.searchsorted(steps.number, record["step"], side="right"))
        rates = steps["lr"][first:done]
        rows.append(
            (
                number(finite(record, "epoch")),
                count(record["step"]),
                format_percent(finite(record, "top1")),
                format_percent(finite(record, "top5")),
                loss(finite(record, "loss")),
                loss(middle(steps["loss"][first:done])),
                number(middle(rates[-1:])),
                rate(middle(steps["images_per_s"][first:done])),
                format_duration(finite(record, "eval_s")),
            )
        )
    columns = (
        "epoch", "step", "top-1", "top-5", "validation loss", "training loss", "learning rate",
        "images/s", "evaluated in",
    )  # fmt: skip
    shown = [n for n, name in enumerate(columns) if name != "top-5" or run.shows_top5]
    cells = [tuple(row[n] for n in shown) for row in reversed(rows)]
    return Table.of("Evaluations", tuple(columns[n] for n in shown), cells, set())


def logged_table(run: RunFiles) -> Table:
    """Metrics of the user's callbacks: their latest, lowest and highest value on each rank."""
    rows = []
    for name, of_ranks in run.logged().items():
        for rank, entries in of_ranks.items():
            values = [value for _, value in entries]
            shown = map(number, (values[-1], min(values), max(values)))
            rows.append((name, str(rank), *shown, count(entries[-1][0]), count(len(entries))))
    columns = ("metric", "rank", "latest", "lowest", "highest", "at step", "entries")
    return Table.of("Logged metrics", columns, rows, {0})


def corrupt_table(run: RunFiles) -> Table:
    """Samples that could not be decoded, each once, with the step that met it first."""
    found: dict[str, tuple[int, int, str]] = {}
    for rank in run.ranks:
        for record in run.of_kind("corrupt", rank):
            name = text_of(record.get("name"))
            met = (record["step"], rank, text_of(record.get("reason")))
            found[name] = min(met, found.get(name, met))
    rows = [
        (name, reason, count(step), str(rank))
        for name, (step, rank, reason) in sorted(found.items(), key=lambda item: item[1])
    ]
    columns = ("sample", "reason", "first at step", "on rank")
    return Table.of("Corrupt samples", columns, rows, {0, 1})


def checkpoint_table(run: RunFiles) -> Table:
    """The checkpoints that exist, the latest first, and `best.pt` with the step whose file it is."""
    # The file of the best step may be gone, while `best.pt` stays.
    best = [r["step"] for r in run.of_kind("checkpoint") if r.get("best") is True]
    rows = []
    for file in checkpoint_files(run.path):
        step = best[-1] if file.step is None and best else file.step
        rows.append((file.name, count(step), format_bytes(file.bytes), file.note))
    return Table.of("Checkpoints", ("file", "step", "size", ""), rows, {0, 3}, max_rows=20)


def save_table(run: RunFiles) -> Table:
    """Every save, the latest first, with the time in which no step could run."""
    rows = [
        (
            text_of(record.get("path")).replace("\\", "/").rpartition("/")[2],
            count(record["step"]),
            format_duration(finite(record, "save_s")),
            format_duration(finite(record, "stall_s")),
            "best so far" if record.get("best") is True else "",
        )
        for record in reversed(run.of_kind("checkpoint"))
    ]
    columns = ("file", "step", "saved in", "steps stood still", "")
    return Table.of("Saves", columns, rows, {0, 4}, max_rows=12)


def skipped_table(run: RunFiles) -> Table:
    """Steps that all ranks skipped, because a gradient was not finite on one of them."""
    steps = run.steps()
    skipped = np.flatnonzero(steps.skipped)
    rows = [
        (count(steps.number[i]), number(middle(epoch)), loss(middle(value)))
        for i in skipped[:MAX_ROWS]
        for epoch, value in [(steps["epoch"][i : i + 1], steps["loss"][i : i + 1])]
    ]
    columns = ("step", "epoch", "loss")
    return Table.of("Skipped steps", columns, rows, set(), total=len(skipped))


def resume_table(run: RunFiles) -> Table:
    rows = [
        (
            date(finite(record, "time")),
            count(record["step"]),
            text_of(record.get("resumed_from")),
            plural(int(finite(record, "world_size") or 0), "rank"),
        )
        for record in run.resumes
    ]
    return Table.of("Resumes", ("when", "at step", "from", "on"), rows, {0, 2})


def rank_table(run: RunFiles) -> Table:
    """The speed of each rank, which reveals a slow disk or device; without rows for a single rank."""
    rows = [
        (
            str(rank),
            count(len(steps)),
            format_duration(middle(steps["step_s"])),
            format_duration(middle(steps["data_s"])),
        )
        for rank in run.ranks
        if len(steps := run.steps(rank))
    ]
    columns = ("rank", "records", "median step", "of it waiting for data")
    return Table.of("Ranks", columns, rows if len(rows) > 1 else [], set())


def changed_table(run: RunFiles) -> Table:
    """The settings that differ from their defaults; without rows where the run has not recorded which."""
    changed = run.start.get("changed")
    names = set(map(text_of, changed)) if isinstance(changed, list) else set()
    rows = [(name, text_of(value)) for name, value in flat(run.config) if name in names]
    return Table.of("Changed", ("setting", "value"), sorted(rows), {0, 1})


def configuration_tables(run: RunFiles) -> list[Table]:
    """A table per section of `config.toml`."""
    general = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {text_of(k): table for k, table in run.config.items() if isinstance(table, dict)}
    tables = {"general": general, **sections} if general else sections
    return [Table.of_pairs(name, table) for name, table in tables.items()]


def environment_tables(run: RunFiles) -> list[Table]:
    """Versions, hardware and automatic choices; of a killed run, which has no summary, from its start."""
    known = run.start | (run.summary or {})
    contents = {
        "Versions": known.get("versions"),
        "Hardware": known.get("hardware"),
        "Chosen automatically": known.get("chosen"),
    }
    return [
        Table.of_pairs(title, content)
        for title, content in contents.items()
        if isinstance(content, dict) and content
    ]


def flat(table: Record, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{text_of(key)}"
        rows += flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return rows
