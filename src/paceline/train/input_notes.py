"""`InputNotes`: what a run tells about its input, each thing once.

In: corrupt samples and loaders' remarks, as steps and evaluations meet them. Out: events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.core.events import CorruptEvent, Event, NoteEvent
from paceline.data.corrupt import CorruptSample


class InputNotes:
    """`is_main`: this rank has the display."""

    def __init__(self, emit: Callable[[Event], None], is_main: bool) -> None:
        self._emit = emit
        self._is_main = is_main
        self._told: set[str] = set()
        self._named: set[str] = set()

    def corrupt(self, step: int, samples: Iterable[CorruptSample], split: str) -> None:
        for sample in samples:
            if sample.name not in self._named:
                self._named.add(sample.name)
                self._emit(CorruptEvent(step, sample.name, sample.reason, split))

    def elsewhere(self, count: int) -> None:
        """What other ranks met is named in their own records."""
        if count > 0 and self._is_main:
            self._emit(NoteEvent(f"{count} corrupt on other ranks; see metrics.rank*.jsonl"))

    def remark(self, text: str, where: str = "") -> None:
        """Every evaluation may remark the same."""
        if text and where + text not in self._told:
            self._told.add(where + text)
            self._emit(NoteEvent(where + text))
