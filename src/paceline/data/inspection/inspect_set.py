"""`inspect_set`: everything that can be told about a data set, and what is wrong with it.

In: a directory and what to look at. Out: facts of each split, notes, and problems, one sentence each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.core.errors import DataError
from paceline.data.inspection.contact_sheet import contact_sheet
from paceline.data.inspection.inspect_shards import OnProgress, shard_problems
from paceline.data.inspection.inspect_split import SplitFacts, inspect_split
from paceline.data.packing.pack_source import all_shards, open_splits
from paceline.data.written_file import write_file

_NAMED = 20


@dataclass
class SetReport:
    """Nothing is wrong where there is no problem; a note is only good to know."""

    splits: dict[str, SplitFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """As JSON has it."""
        splits = {name: facts.table() for name, facts in self.splits.items()}
        return {"splits": splits, "notes": self.notes, "problems": self.problems}


def inspect_set(
    directory: str,
    kind: str = "auto",
    split: str = "all",
    *,
    look_at: int | None = 256,
    checksums: bool = True,
    workers: int = 1,
    sheet: tuple[Path, int] | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> SetReport:
    """`look_at` None decodes every image. DataError where there is no data at all, or where the sheet
    (its path, and how many images are on it) cannot be written."""
    report = SetReport()
    shards = all_shards(directory) if kind in ("auto", "shards") else []
    if shards:
        report.problems += shard_problems(
            Path(directory).expanduser(), shards, checksums, on_progress
        )
    try:
        sources = open_splits(directory, kind, split, report.notes.append)
    except DataError as error:
        if not report.problems:
            raise
        # Said in full already, if it is about a shard.
        report.problems += [] if str(error) in report.problems else [str(error)]
        return report
    for name, source in sources.items():
        wanted = len(source) if look_at is None else min(look_at, len(source))
        facts = inspect_split(
            source, wanted, workers, partial(_tell, on_progress, f"{name}: images", wanted)
        )
        report.splits[name] = facts
        report.problems += [
            f"{name}: corrupt: {s.name} ({s.reason})" for s in facts.corrupt[:_NAMED]
        ]
        if len(facts.corrupt) > _NAMED:
            report.problems.append(f"{name}: {len(facts.corrupt) - _NAMED} more are corrupt")
        if facts.empty_classes:
            report.notes.append(f"{name}: no sample of {facts.empty_classes} classes")
    if sheet is not None:
        path, images = sheet
        write_file(path, contact_sheet(next(iter(sources.values())), images))
    for source in sources.values():
        source.close()
    return report


def _tell(on_progress: OnProgress, what: str, total: int, done: int) -> None:
    on_progress(what, done, total)
