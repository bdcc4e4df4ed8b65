"""`HostShare`: which samples the host decodes in the GPU's place, and how many.

In: samples that are not for the GPU's decoder, and those that it failed with. Out: their counts, apart,
and a remark. They are remembered with their source, so that a chunk meets an odd file once: from then on
it goes straight to the host. The first failure is told at once, the counts at the end.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

from paceline.data.sources.source import Source

Why = Literal["unfit", "refused"]
# Of one source. Beyond it, samples are found out anew each time.
_MOST_REMEMBERED = 100_000


@dataclass
class _Known:
    """Of one source: whose samples are the host's, and the first failure, in words."""

    samples: dict[int, Why] = field(default_factory=dict)
    first: str = ""


# Loaders come and go, one for each evaluation; the source stays.
_REMEMBERED: WeakKeyDictionary[Source, _Known] = WeakKeyDictionary()


class HostShare:
    """Used by many threads at once."""

    def __init__(self, source: Source, decoder: str) -> None:
        self._source = source
        self._decoder = decoder
        self._lock = threading.Lock()
        self._known = _REMEMBERED.setdefault(source, _Known())
        self._counts: Counter[Why] = Counter()
        self._failures = 0

    def takes(self, index: int) -> bool:
        """Whether this sample was the host's before; if so, it is counted."""
        why = self._known.samples.get(index)
        if why is not None:
            with self._lock:
                self._counts[why] += 1
        return why is not None

    def add(self, index: int, why: Why) -> None:
        """`unfit`: nothing that the decoder could show as Pillow does; `refused`: it failed."""
        with self._lock:
            self._counts[why] += 1
            if len(self._known.samples) < _MOST_REMEMBERED:
                self._known.samples[index] = why

    def failed(self, problem: str, index: int | None) -> None:
        """Tells the first failure, of a sample, or of a chunk whose files are good one by one."""
        name = "a chunk" if index is None else self._source.name(index)
        with self._lock:
            self._failures += 1
            if self._known.first:
                return
            self._known.first = f"{name}: {problem}"
        way = "its files are decoded one by one" if index is None else "the host decodes it"
        sys.stderr.write(
            f"paceline: warning: {self._decoder} failed with {name} ({problem}); {way}\n"
        )

    def remark(self) -> str:
        """Empty where the GPU decoded all."""
        with self._lock:
            unfit, refused, failures = (
                self._counts["unfit"],
                self._counts["refused"],
                self._failures,
            )
        said = [f"{unfit:,} no JPEGs for the GPU"] if unfit else []
        if refused or failures:
            first = self._known.first
            said.append(f"{refused:,} after the GPU's decoder failed (the first: {first})")
        told = ", ".join(said)
        return f"{unfit + refused:,} samples were decoded on the host: {told}" if told else ""
