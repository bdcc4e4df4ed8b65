"""Details of an evaluation: accuracy of each class, confusions and the most confident mistakes.

With `run.eval_details`, a run writes these details to `evaluation.json`. The file is untrusted, so
invalid parts are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.files import read_regular
from paceline.core.units import count, format_percent, markup, text_of
from paceline.core.untrusted import ParseError, is_count, is_finite, parse_json
from paceline.report.tables import Table

EVALUATION_NAME = "evaluation.json"
_MAX_CLASSES = 100_000
_MAX_CONFUSIONS = 20
_MAX_MISTAKES = 48
_CLASS_ROWS = 40
# Limits in bytes; a thumbnail has a few thousand bytes.
_LARGEST_FILE, _LARGEST_IMAGE = 64 << 20, 40_000
_IMAGE = re.compile(r"[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction. `image` is a JPEG in base64, or "" if no thumbnail was stored."""

    label: int
    predicted: int
    confidence: float
    image: str


@dataclass(frozen=True)
class Evaluation:
    """The contents of `evaluation.json`.

    Attributes:
        step: The step after which the evaluation ran.
        classes: The names of the classes.
        counts: The number of samples by (true class, predicted class).
        mistakes: The wrong predictions with the highest confidence.
    """

    step: int
    classes: list[str]
    counts: dict[tuple[int, int], int]
    mistakes: list[Mistake]

    @cached_property
    def totals(self) -> dict[int, int]:
        """The number of samples of each class."""
        totals: dict[int, int] = {}
        for (label, _), samples in self.counts.items():
            totals[label] = totals.get(label, 0) + samples
        return totals

    @classmethod
    def read(cls, folder: Path) -> Evaluation | None:
        """Reads `evaluation.json` from a run folder; returns None if it is missing or invalid."""
        try:
            table = parse_json(read_regular(folder / EVALUATION_NAME, _LARGEST_FILE))
        except (OSError, ParseError):
            return None
        if not isinstance(table, dict) or not is_count(table.get("step")):
            return None
        names = table.get("classes")
        if not isinstance(names, list) or not 0 < len(names) <= _MAX_CLASSES:
            return None
        size = len(names)
        counts = {
            (entry[0], entry[1]): entry[2]
            for entry in _listed(table.get("counts"))
            if isinstance(entry, list)
            and len(entry) == 3
            and all(is_count(part) for part in entry)
            and max(entry[:2]) < size
        }
        entries = _listed(table.get("mistakes"))[:_MAX_MISTAKES]
        mistakes = [m for m in (_mistake(entry, size) for entry in entries) if m]
        return cls(table["step"], [text_of(name) for name in names], counts, mistakes)

    def class_table(self) -> Table:
        """Returns a table of the classes, lowest accuracy first."""
        rows = sorted(
            (self.counts.get((number, number), 0) / total, name, total)
            for number, name in enumerate(self.classes)
            if (total := self.totals.get(number, 0))
        )
        cells = [
            (name, format_percent(100 * accuracy, 1), count(total))
            for accuracy, name, total in rows
        ]
        columns = ("class", "accuracy", "images")
        return Table.of("Accuracy by class, lowest first", columns, cells, {0}, _CLASS_ROWS)

    def confusion_table(self) -> Table:
        """Returns a table of the pairs of classes that are confused most often."""
        wrong = [(n, pair) for pair, n in self.counts.items() if pair[0] != pair[1] and n]
        wrong.sort(key=lambda item: (-item[0], item[1]))
        rows = [
            (
                self.classes[label],
                self.classes[predicted],
                count(n),
                format_percent(100 * n / self.totals[label], 1),
            )
            for n, (label, predicted) in wrong[:_MAX_CONFUSIONS]
        ]
        columns = ("class", "predicted as", "images", "of the class")
        return Table.of("Most frequent confusions", columns, rows, {0, 1})

    def gallery(self) -> str:
        """Builds HTML that shows the most confident mistakes, with their images if available."""
        items = []
        for mistake in self.mistakes:
            image = (
                '<svg viewBox="0 0 64 64" role="img" aria-label="image"><image width="64" height="64" '
                f'href="data:image/jpeg;base64,{mistake.image}"/></svg>'
                if mistake.image
                else ""
            )
            confidence = format_percent(100 * mistake.confidence, 0)
            items.append(
                f"<li>{image}<span>{markup(self.classes[mistake.predicted])} {confidence}</span>"
                f"<span>is {markup(self.classes[mistake.label])}</span></li>"
            )
        return f'<ul class="gallery">{"".join(items)}</ul>' if items else ""


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _mistake(entry: Any, classes: int) -> Mistake | None:
    """Converts an entry of the file to a `Mistake`; returns None if the entry is invalid."""
    if not isinstance(entry, dict):
        return None
    label, predicted = entry.get("label"), entry.get("predicted")
    if not is_count(label, 0, classes - 1) or not is_count(predicted, 0, classes - 1):
        return None
    confidence, image = entry.get("confidence"), entry.get("image")
    if not is_finite(confidence) or not 0 <= confidence <= 1:
        return None
    if not (isinstance(image, str) and len(image) <= _LARGEST_IMAGE and _IMAGE.fullmatch(image)):
        image = ""
    return Mistake(label, predicted, confidence, image)
