"""`SplitFacts`: what one split holds, counted, and a sample of its images decoded.

In: a source and how many images to look at. Out: counts by class, format, mode and size, the bytes, and
the corrupt images among those looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.core.errors import DataError
from paceline.data.corrupt import CorruptSample
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.decoding.image_facts import ImageFacts, image_facts
from paceline.data.packing.in_order import in_order
from paceline.data.randomness import PACK_STREAM, Int64, hash64
from paceline.data.sources.source_protocol import Source

_Look = tuple[int, ImageFacts | CorruptSample]


@dataclass
class SplitFacts:
    """Sizes, modes, formats and `looked_bytes` are those of the images looked at."""

    samples: int
    classes: int
    per_class: tuple[int, float, int]
    empty_classes: int
    looked_at: int = 0
    looked_bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    corrupt: list[CorruptSample] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "samples": self.samples,
            "classes": self.classes,
            "samples_per_class": dict(zip(("min", "median", "max"), self.per_class, strict=True)),
            "empty_classes": self.empty_classes,
            "looked_at": self.looked_at,
            "mean_bytes": self.looked_bytes / max(1, self.looked_at),
            "bytes": round(self.looked_bytes * self.samples / max(1, self.looked_at)),
            "bytes_are": "counted" if self.looked_at == self.samples else "estimated",
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "width": _spread(self.widths),
            "height": _spread(self.heights),
            "corrupt": [{"name": s.name, "reason": s.reason} for s in self.corrupt],
        }


def inspect_split(
    source: Source, look_at: int, workers: int, on_sample: Callable[[int], None] = lambda done: None
) -> SplitFacts:
    """Decodes `look_at` images, all where there are fewer. Storage that fails counts as corrupt."""
    counts = np.bincount(source.labels, minlength=len(source.classes))
    facts = SplitFacts(
        samples=len(source),
        classes=len(source.classes),
        per_class=(int(counts.min()), float(np.median(counts)), int(counts.max())),
        empty_classes=int((counts == 0).sum()),
    )

    def look(index: int) -> _Look:
        try:
            data = source.read(index)
            found = image_facts(data)
            decode(data, found.channels)
        except (CorruptImage, DataError) as error:
            return 0, CorruptSample(index, source.name(index), str(error))
        return len(data) if isinstance(data, bytes) else data.nbytes, found

    for done, (size, found) in enumerate(
        in_order(look, chosen(len(source), look_at).tolist(), workers), start=1
    ):
        facts.looked_at = done
        facts.looked_bytes += size
        if isinstance(found, CorruptSample):
            facts.corrupt.append(found)
        else:
            facts.formats[found.format] += 1
            facts.modes[found.mode] += 1
            facts.widths.append(found.width)
            facts.heights.append(found.height)
        on_sample(done)
    return facts


def chosen(count: int, wanted: int) -> Int64:
    """Indices in ascending order, `wanted` of them drawn by hash; the same ones every time."""
    indices = np.arange(count, dtype=np.int64)
    if wanted >= count:
        return indices
    return np.sort(np.argsort(hash64(0, PACK_STREAM, indices), kind="stable")[:wanted])


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}
