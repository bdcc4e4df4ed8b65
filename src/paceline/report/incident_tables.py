"""Tables of what happened on the way: resumes, skipped steps, corrupt samples, checkpoints, ranks.

In: a `RunFiles`. Out: `Table`s; one without rows where nothing of the kind happened.
"""

from __future__ import annotations

from paceline.report.quantities import count, duration, loss, many, moment, number, shown
from paceline.report.run_files import RunFiles, finite
from paceline.report.tables import Table, median_of


def corrupt_table(run: RunFiles) -> Table:
    """Samples that could not be decoded, each once, where it was first met."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for rank in run.ranks:
        for record in run.of_kind("corrupt", rank):
            what = (record["step"], rank, shown(record.get("reason")))
            found.setdefault(shown(record.get("name")), []).append(what)
    rows = [
        (name, min(times)[2], count(min(times)[0]), str(min(times)[1]))
        for name, times in sorted(found.items(), key=lambda item: min(item[1]))
    ]
    columns = ("sample", "reason", "first at step", "on rank")
    return Table.of("Corrupt samples", columns, rows, {0, 1})


def checkpoint_table(run: RunFiles) -> Table:
    """Checkpoints, the latest first."""
    rows = [
        (
            shown(record.get("path")),
            count(record["step"]),
            duration(finite(record, "save_s")),
            "best so far" if record.get("best") is True else "",
        )
        for record in reversed(run.of_kind("checkpoint"))
    ]
    return Table.of("Checkpoints", ("file", "step", "saved in", ""), rows, {0, 3}, max_rows=12)


def skipped_table(run: RunFiles) -> Table:
    """Steps whose gradient was not finite on some rank, so that no rank took them."""
    rows = [
        (count(record["step"]), number(finite(record, "epoch")), loss(finite(record, "loss")))
        for record in run.of_kind("step")
        if record.get("skipped") is True
    ]
    return Table.of("Skipped steps", ("step", "epoch", "loss"), rows, set())


def resume_table(run: RunFiles) -> Table:
    """Where the run was taken up again, and from what."""
    rows = [
        (
            moment(finite(record, "time")),
            count(record["step"]),
            shown(record.get("resumed_from")),
            many(int(finite(record, "world_size") or 0), "rank"),
        )
        for record in run.resumes
    ]
    return Table.of("Resumes", ("when", "at step", "from", "on"), rows, {0, 2})


def rank_table(run: RunFiles) -> Table:
    """Pace of each rank: a slow disk or device shows here. Empty where one rank alone reports."""
    steps = {rank: run.of_kind("step", rank) for rank in run.ranks}
    rows = [
        (
            str(rank),
            count(len(records)),
            duration(median_of(records, "step_s")),
            duration(median_of(records, "data_s")),
        )
        for rank, records in steps.items()
        if records
    ]
    columns = ("rank", "records", "median step", "of it waiting for data")
    return Table.of("Ranks", columns, rows if len(rows) > 1 else [], set())


def notes(run: RunFiles) -> list[str]:
    """What the run remarked, each remark once."""
    return list(dict.fromkeys(shown(record.get("text")) for record in run.of_kind("note")))
