"""Progress bars for work on data: one for each thing that is being done.

In: how much of what is done. Out: live bars on a terminal's standard error, nothing elsewhere.
"""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressBars:
    """A bar appears when it is first told of."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remark]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: int, total: int, remark: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, remark="")
        self._progress.update(self._tasks[what], completed=done, total=total, remark=remark)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()
