"""What an evaluation got wrong: accuracy of each class, confusions, and the most confident mistakes.

A run writes these to `evaluation.json` (`run.eval_details`). The file is untrusted: what does not fit is
left out.
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
# A larger matrix has cells too small to read; a table of the most frequent confusions stays.
_MATRIX_CLASSES = 30
_MOST_CLASSES = 100_000
_MOST_CONFUSIONS = 20
_MOST_MISTAKES = 48
_CLASS_ROWS = 40
# Bytes; a thumbnail has a few thousand.
_LARGEST_FILE, _LARGEST_IMAGE = 64 << 20, 40_000
_IMAGE = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_CELL, _MARGIN = 18, 8


@dataclass(frozen=True)
class Mistake:
    """`image` is a JPEG in base64; empty where there is none."""

    label: int
    predicted: int
    confidence: float
    image: str


@dataclass(frozen=True)
class Evaluation:
    """`counts` has the number of samples by (class, prediction)."""

    step: int
    classes: list[str]
    counts: dict[tuple[int, int], int]
    mistakes: list[Mistake]

    @cached_property
    def totals(self) -> dict[int, int]:
        """The number of samples of each class."""
        found: dict[int, int] = {}
        for (label, _), samples in self.counts.items():
            found[label] = found.get(label, 0) + samples
        return found

    @classmethod
    def read(cls, folder: Path) -> Evaluation | None:
        """None where there is no such file, or none that can be used."""
        file = folder / EVALUATION_NAME
        try:
            found = parse_json(read_regular(file, _LARGEST_FILE))
        except (OSError, ParseError):
            return None
        if not isinstance(found, dict) or not is_count(found.get("step")):
            return None
        names = found.get("classes")
        if not isinstance(names, list) or not 0 < len(names) <= _MOST_CLASSES:
            return None
        size = len(names)
        counts = {
            (entry[0], entry[1]): entry[2]
            for entry in _listed(found.get("counts"))
            if isinstance(entry, list)
            and len(entry) == 3
            and all(is_count(part) for part in entry)
            and max(entry[:2]) < size
        }
        given = _listed(found.get("mistakes"))[:_MOST_MISTAKES]
        mistakes = [m for m in (_mistake(entry, size) for entry in given) if m]
        return cls(found["step"], [text_of(name) for name in names], counts, mistakes)

    def class_table(self) -> Table:
        """The classes with the lowest accuracy first."""
        rows = []
        for number, name in enumerate(self.classes):
            total = self.totals.get(number, 0)
            if total:
                right = self.counts.get((number, number), 0)
                rows.append((right / total, name, total))
        rows.sort()
        cells = [
            (name, format_percent(100 * accuracy, 1), count(total))
            for accuracy, name, total in rows
        ]
        columns = ("class", "accuracy", "images")
        return Table.of("Accuracy by class, lowest first", columns, cells, {0}, _CLASS_ROWS)

    def confusion_table(self) -> Table:
        wrong = [(n, pair) for pair, n in self.counts.items() if pair[0] != pair[1] and n]
        wrong.sort(key=lambda item: (-item[0], item[1]))
        rows = [
            (
                self.classes[label],
                self.classes[predicted],
                count(n),
                format_percent(100 * n / self.totals[label], 1),
            )
            for n, (label, predicted) in wrong[:_MOST_CONFUSIONS]
        ]
        columns = ("class", "predicted as", "images", "of the class")
        return Table.of("Most frequent confusions", columns, rows, {0, 1})

    def matrix(self) -> str:
        """The confusion matrix as SVG, a row for each class; empty for too many classes."""
        size = len(self.classes)
        if size > _MATRIX_CLASSES or not self.counts:
            return ""
        left = min(120, 8 + max(7 * len(name[:16]) for name in self.classes))
        width = left + size * _CELL + _MARGIN
        parts = []
        for row, name in enumerate(self.classes):
            y, total = _MARGIN + row * _CELL, self.totals.get(row, 0)
            label = name if len(name) <= 16 else f"{name[:15]}…"
            parts.append(
                f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{markup(label)}</text>'
            )
            for column in range(size):
                n = self.counts.get((row, column), 0)
                if not total:
                    continue
                title = f"{name} predicted as {self.classes[column]}: {n:,} of {total:,}"
                css = "right" if row == column else "wrong"
                parts.append(
                    f'<rect class="cell {css}" x="{left + column * _CELL}" y="{y}" width="{_CELL - 1}" '
                    f'height="{_CELL - 1}" fill-opacity="{n / total:.3f}"><title>{markup(title)}</title>'
                    "</rect>"
                )
        height = 2 * _MARGIN + size * _CELL
        return (
            f'<svg class="chart matrix" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="confusion matrix of {size} classes, a row for each class">'
            f"{''.join(parts)}</svg>"
        )

    def gallery(self) -> str:
        """The most confident mistakes, each with its image if there is one."""
        items = []
        for mistake in self.mistakes:
            image = (
                '<svg viewBox="0 0 64 64" role="img" aria-label="image"><image width="64" height="64" '
                f'href="data:image/jpeg;base64,{mistake.image}"/></svg>'
                if mistake.image
                else ""
            )
            share = format_percent(100 * mistake.confidence, 0)
            items.append(
                f"<li>{image}<span>{markup(self.classes[mistake.predicted])} {share}</span>"
                f"<span>is {markup(self.classes[mistake.label])}</span></li>"
            )
        return f'<ul class="gallery">{"".join(items)}</ul>' if items else ""


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _mistake(entry: Any, classes: int) -> Mistake | None:
    if not isinstance(entry, dict):
        return None
    label, predicted = entry.get("label"), entry.get("predicted")
    if not is_count(label, 0, classes - 1) or not is_count(predicted, 0, classes - 1):
        return None
    confidence, image = entry.get("confidence"), entry.get("image")
    if not is_finite(confidence) or not 0 <= confidence <= 1:
        return None
    fits = isinstance(image, str) and len(image) <= _LARGEST_IMAGE and _IMAGE.fullmatch(image)
    return Mistake(label, predicted, confidence, image if fits and isinstance(image, str) else "")
