"""`Table`, and the tables of a run: results, evaluations, incidents, configuration, environment.

Cells are plain text, for the terminal and for HTML pages. Long tables show only their first rows,
and the number of rows that are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
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
from paceline.plan.plan_file import PlanFile
from paceline.report.bottleneck import ExposedWaits, InputStall, MeasuredStep
from paceline.report.outcome import Outcome
from paceline.report.records import Record, declared_counts, finite, integer, middle
from paceline.report.run_files import RunFiles

Row = tuple[str, ...]
MAX_ROWS = 200


@dataclass(frozen=True)
class Table:
    """A table of text. Columns whose index is in `text_columns` are aligned left, others right."""

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
        """Builds a table of at most `max_rows` rows, with a note on the number of rows left out."""
        left_out = len(rows) - max_rows
        note = f"{count(left_out)} more not shown" if left_out > 0 else ""
        return cls(title, columns, tuple(rows[:max_rows]), frozenset(text_columns), note)

    @classmethod
    def of_pairs(cls, title: str, values: Record) -> Table:
        """Builds a table of keys and values without headings; nested keys are joined by dots."""
        rows = tuple((key, text_of(value)) for key, value in flat(values))
        return cls(title, ("", ""), rows, frozenset({0, 1}))


def result_rows(run: RunFiles) -> list[tuple[str, str]]:
    """Returns the label and the value of each result of a run."""
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
    steps, batch = count(outcome.steps), count(outcome.global_batch_size)
    if outcome.total_steps and outcome.total_steps != outcome.steps:
        steps += f" of {count(outcome.total_steps)}"
    if outcome.global_batch_size != outcome.largest_batch:
        batch += f", at most {count(outcome.largest_batch)}"
    rows += [
        ("epochs", number(outcome.epochs)),
        ("steps", steps),
        ("global batch", batch),
        ("ranks (virtual)" if outcome.is_virtual else "ranks", count(outcome.world_size)),
    ]
    rows += [(figure.label, figure.text) for figure in outcome.figures if figure.text]
    noise, largest = outcome.noise_scale or 0.0, outcome.largest_batch or 0
    if noise > 0 and largest > 0:
        rows.append(("gradient noise scale", describe_noise(noise, largest)))
    if outcome.state_bytes_per_parameter is not None:
        rows.append(("optimizer state", f"{outcome.state_bytes_per_parameter:.3g} bytes/parameter"))
    if exchange_state := outcome.exchange_state_bytes_per_parameter:
        rows.append(("exchange state", f"{exchange_state:.3g} bytes/parameter"))
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
    rows += [(label, count(amount)) for label, amount in incidents.items() if amount]
    if lost := run.of_kind("generation"):
        spent = sum(finite(record, "recover_s") or 0.0 for record in lost)
        useful = 100 * (1 - spent / max(outcome.train_s or 0.0, spent, 1e-9))
        ranks = sum(len(names) for r in lost if isinstance(names := r.get("lost"), list))
        rows.append(("lost ranks", f"{count(ranks)}, {format_percent(useful)} of the time useful"))
    return rows


def expectation_table(run: RunFiles) -> Table:
    """Compares measured times with the predictions in the plan file; no rows without predictions."""
    try:
        expected = PlanFile.read(run.path / "plan.toml").expected
    except ConfigError:
        expected = None
    measured = MeasuredStep.of(run)
    rows: list[Row] = []
    if expected is not None and measured is not None:
        for name, predicted_s, measured_s in (
            ("step", expected.step_s, measured.step_s),
            ("compute", expected.compute_s, measured.compute_s),
            ("exposed communication", expected.exposed_comm_s, measured.exposed_s),
            ("input", expected.input_stall_s, measured.input_s),
        ):
            is_positive = measured_s > 0 and predicted_s > 0
            difference = f"{predicted_s / measured_s - 1:+.0%}" if is_positive else UNKNOWN
            rows.append((name, f"{1e3 * predicted_s:.2f}", f"{1e3 * measured_s:.2f}", difference))
    columns = ("part", "predicted ms", "measured ms", "difference")
    return Table.of("Predicted and measured", columns, rows, {0})


def stall_table(run: RunFiles) -> Table:
    """Lists how long each rank waited for its input, by cause; no rows if no step waited."""
    rows = []
    for rank in run.ranks:
        stall = InputStall.of(run, rank)
        for cause, seconds in stall.causes.items():
            share = format_percent(100 * seconds / stall.step_s, 1)
            rows.append((str(rank), cause, format_duration(seconds / stall.steps), share))
    columns = ("rank", "cause", "a step", "of the steps' time")
    return Table.of("Waiting for the input", columns, rows, {1})


def count_tables(run: RunFiles) -> list[Table]:
    """Returns a table for each count that the run declares (`declared_counts`), over all steps."""
    declared = declared_counts(run.start) if run.start else {}
    tables = []
    for name, (title, numbered, counted) in declared.items():
        counts: dict[int, int] = {}
        for number_text, times in run.steps().sums(name).items():
            counts[int(number_text)] = counts.get(int(number_text), 0) + round(times)
        total = sum(counts.values())
        rows = [
            (count(at), count(times), format_percent(100 * times / total, 1))
            for at, times in sorted(counts.items())
        ]
        tables.append(Table.of(title, (numbered, counted, "share"), rows, set()))
    return tables


def epoch_table(run: RunFiles) -> Table:
    """Lists evaluations, latest first, with medians of the training steps since the previous one."""
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
    """Lists the latest, lowest and highest value of each metric that callbacks logged, by rank."""
    rows = []
    for name, by_rank in run.logged().items():
        for rank, entries in by_rank.items():
            values = [value for _, value in entries]
            shown = map(number, (values[-1], min(values), max(values)))
            rows.append((name, str(rank), *shown, count(entries[-1][0]), count(len(entries))))
    columns = ("metric", "rank", "latest", "lowest", "highest", "at step", "entries")
    return Table.of("Logged metrics", columns, rows, {0})


def corrupt_table(run: RunFiles) -> Table:
    """Lists the samples that could not be decoded, each with the first step that needed it."""
    first: dict[str, tuple[int, int, str]] = {}
    for rank in run.ranks:
        for record in run.of_kind("corrupt", rank):
            name = text_of(record.get("name"))
            occurrence = record["step"], rank, text_of(record.get("reason"))
            first[name] = min(first.get(name, occurrence), occurrence)
    rows = [
        (name, reason, count(step), str(rank))
        for name, (step, rank, reason) in sorted(first.items(), key=lambda item: item[1])
    ]
    columns = ("sample", "reason", "first at step", "on rank")
    return Table.of("Corrupt samples", columns, rows, {0, 1})


def save_table(run: RunFiles) -> Table:
    """Lists checkpoints, latest first, with the time for which training stopped to write each."""
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
    """Lists the steps that all ranks skipped because a gradient was not finite on some rank."""
    steps = run.steps()
    rows = [
        (count(steps.number[i]), number(middle(epoch)), loss(middle(value)))
        for i in np.flatnonzero(steps.skipped)
        for epoch, value in [(steps["epoch"][i : i + 1], steps["loss"][i : i + 1])]
    ]
    return Table.of("Skipped steps", ("step", "epoch", "loss"), rows, set())


def resume_table(run: RunFiles) -> Table:
    """Lists the starts that continued the run."""
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


def loss_table(run: RunFiles) -> Table:
    """Lists the generations that followed lost ranks."""
    rows = [
        (
            date(finite(record, "time")),
            count(record.get("step")),
            text_of(record.get("cause")),
            plural(integer(record, "ranks") or 0, "rank"),
            "yes" if record.get("repeated") is True else "no",
            format_duration(finite(record, "recover_s")),
        )
        for record in run.of_kind("generation")
    ]
    columns = ("when", "after step", "cause", "left", "step repeated", "recovered in")
    return Table.of("Lost ranks", columns, rows, {0, 2})


def rank_table(run: RunFiles) -> Table:
    """Lists the speed of each rank, which reveals a slow disk or device; no rows for a single rank."""
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
    """Lists the settings that differ from their defaults; no rows if the run did not record them."""
    changed = run.start.get("changed")
    names = set(map(text_of, changed)) if isinstance(changed, list) else set()
    rows = [(name, text_of(value)) for name, value in flat(run.config) if name in names]
    return Table.of("Changed", ("setting", "value"), sorted(rows), {0, 1})


def configuration_tables(run: RunFiles) -> list[Table]:
    """Returns a table for each section of `config.toml`."""
    general = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {text_of(k): table for k, table in run.config.items() if isinstance(table, dict)}
    tables = {"general": general, **sections} if general else sections
    return [Table.of_pairs(name, table) for name, table in tables.items()]


def environment_tables(run: RunFiles) -> list[Table]:
    """Returns tables of versions, hardware and automatic choices.

    The values come from the summary or, if it lacks them, from the start record.
    """
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
    """Flattens nested tables to (key, value) pairs; nested keys are joined by dots."""
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{text_of(key)}"
        rows += flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return rows
